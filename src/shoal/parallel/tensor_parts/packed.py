"""Layers that hold several in one weight, as queries, keys and values: tp cuts each of their parts.

    whole   q0 q1 | k0 k1 | v0 v1        rank 0   q0 k0 v0        rank 1   q1 k1 v1

So a rank's piece is several boxes of the whole tensor, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.comm.collectives import part
from shoal.errors import ShoalError


def cut(full: Tensor, dim: int, parts: Sequence[int], *, index: int, degree: int) -> Tensor:
    """A rank's piece of a tensor, part by part. Without parts it has one."""
    if parts and (sum(parts) != full.shape[dim] or any(size % degree for size in parts)):
        raise ShoalError(
            f"parts must be numbers that tp={degree} divides, {full.shape[dim]} together, got {list(parts)}",
            fix="the sizes of the layer's parts in Description(parts=...), or tp=1",
            code="M131",
        )
    whole = full.split(list(parts), dim) if parts else (full,)
    return torch.cat([part(one, dim, index=index, degree=degree) for one in whole], dim)


def in_order(joined: Tensor, dim: int, parts: Sequence[int], degree: int) -> Tensor:
    """The whole tensor of all ranks' pieces, one after the other."""
    if not parts:
        return joined
    pieces = [one.split([size // degree for size in parts], dim) for one in joined.chunk(degree, dim)]
    return torch.cat([piece[number] for number in range(len(parts)) for piece in pieces], dim)


def ranges(size: int, parts: Sequence[int], *, index: int, degree: int) -> Iterator[tuple[int, int]]:
    """Where each box of a rank's piece begins in the whole, and its length."""
    first = 0
    for one in parts or (size,):
        each = -(-one // degree)
        begin = min(one, each * index)
        yield first + begin, max(0, min(each, one - begin))
        first += one
