"""A sum over up to `SAMPLES` values of a tensor, at places that its shape decides, which other values change.

Sums of pieces add up to that of the whole tensor, however it is cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.numerics.checksum import MULTIPLIER
from shoal.numerics.init import key

SAMPLES = 1024


def sampled_sum(name: str, piece: Tensor, shape: tuple[int, ...], begin: tuple[int, ...]) -> int:
    """The part of a tensor's sum that is in a piece. `begin`: where it begins in the whole tensor of this shape."""
    return (key(0, name, *shape) | 1) * _sampled(piece, shape, begin)


def _sampled(piece: Tensor, shape: tuple[int, ...], begin: tuple[int, ...]) -> int:
    """The sum of bits · weight over those sampled places of the whole tensor that are in this piece."""
    size = torch.Size(shape).numel()
    count = min(size, SAMPLES)
    if not count or not piece.numel():
        return 0
    flat = torch.arange(count) * size // count
    rest, places = flat, []
    for extent, first, own in zip(reversed(shape), reversed(begin), reversed(piece.shape), strict=True):
        places.append((rest % extent - first, own))
        rest = rest // extent
    is_here = torch.ones(count, dtype=torch.bool)
    for place, own in places:
        is_here &= (place >= 0) & (place < own)
    index = tuple(place[is_here].to(piece.device) for place, _ in reversed(places))
    values = piece[index] if index else piece.reshape(1)
    bits = values.to("cpu", torch.float64).view(torch.int64)
    weights = (flat[is_here] + 1) * (MULTIPLIER >> 1) | 1
    return int((bits * weights).sum()) % 2**64
