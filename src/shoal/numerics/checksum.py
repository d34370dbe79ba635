"""An exact checksum of a tensor's bits, to compare copies of it on several ranks without sending them.

The bits are read as integers x₀, x₁, ... of at most 32 bits. With pseudo-random odd numbers w₀, w₁, ...,

    checksum = Σ xᵢ wᵢ  (mod 2⁶⁴),  chunk by chunk:  total ← total · M + Σ

A single flipped bit changes a sum by ±2ᵏ wᵢ with k < 32, which is never 0 modulo 2⁶⁴ because wᵢ and M are odd. Values
in another order give another sum, since every place has its own weight. Integer addition does not round, so the result
is the same on every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

CHUNK = 2**20
"""Integers that are weighted at a time: 8 MB of memory in addition to the tensor."""
MULTIPLIER = 0x5851F42D4C957F2D
"""Knuth's for a linear congruential generator (MMIX): odd, and 5 modulo 8, so that its powers differ."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


@torch.no_grad()
def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return the checksum of each tensor; the host waits for a device once for all of them."""
    sums = [_chunk_sums(tensor.detach()) for tensor in tensors]
    flat = [one.to("cpu", non_blocking=True) for ones in sums for one in ones]
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()
    numbers = iter([int(one) for one in flat])
    return [fold(next(numbers) for _ in ones) for ones in sums]


def fold(numbers: Iterable[int]) -> int:
    """Hash several numbers, in their order, into one.

    >>> fold([1, 2]) != fold([2, 1])
    True
    """
    total = 0
    for number in numbers:
        total = (total * MULTIPLIER + number) % 2**64
    return total


def signed(number: int) -> int:
    """Convert 64 bits to torch's int64."""
    return number - 2**64 if number >= 2**63 else number


def _chunk_sums(tensor: Tensor) -> list[Tensor]:
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = plain.contiguous().reshape(-1).view(_INTEGERS[plain.element_size()])
    return [(chunk.long() * _weights(tensor.device)[: len(chunk)]).sum() for chunk in bits.split(CHUNK) if len(chunk)]


@cache
def _weights(device: torch.device) -> Tensor:
    places = np.arange(1, CHUNK + 1, dtype=np.uint64)
    mixed = places * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)  # the finaliser of SplitMix64
    return torch.from_numpy(((mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)
