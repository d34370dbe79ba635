"""From the flat partitions of ZeRO to whole tensors, each read when it is written.

stage 1, 2   a group's parameters end to end, cut into equal parts over the ranks
stage 3      each parameter cut into equal parts over the ranks, a rank's parts end to end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from shoal.checkpoint.formats.lazy_tensor import Box, LazyTensor
from shoal.checkpoint.storage.manifest import Shape
from shoal.checkpoint.storage.shard_file import NAMES
from shoal.errors import ShoalError

Shapes = Mapping[str, Sequence[int]]
Place = tuple[int, int, int]
"""The vector of a rank, and the elements of it: first, and how many."""


def of_stage_2(vectors: Sequence[Tensor], shapes: Shapes, paddings: Sequence[int] | None) -> dict[str, LazyTensor]:
    """Tensors of one group, from each rank's part of its vector."""
    found, first = {}, 0
    total = sum(vector.numel() for vector in vectors)
    for number, (name, size) in enumerate(shapes.items()):
        length = prod(size)
        if first + length > total:
            raise too_short(name, first + length, total)
        found[name] = _lazy(name, tuple(size), vectors, _places(vectors, first, length))
        first += length + (paddings[number] if paddings else 0)
    return found


def _places(vectors: Sequence[Tensor], first: int, length: int) -> list[Place]:
    """Where a range of the whole vector lies."""
    places, before = [], 0
    for rank, vector in enumerate(vectors):
        begin, end = max(first, before), min(first + length, before + vector.numel())
        if begin < end:
            places.append((rank, begin - before, end - begin))
        before += vector.numel()
    return places


def of_stage_3(vectors: Sequence[Tensor], shapes: Shapes) -> dict[str, LazyTensor]:
    """Tensors of all groups, from each rank's vector."""
    found, first, ranks = {}, 0, len(vectors)
    for name, size in shapes.items():
        length = prod(size)
        part = -(-length // ranks)
        places = [(rank, first, min(part, max(0, length - rank * part))) for rank in range(ranks)]
        if first + part > min(vector.numel() for vector in vectors):
            raise too_short(name, first + part, min(vector.numel() for vector in vectors))
        found[name] = _lazy(name, tuple(size), vectors, places)
        first += part
    return found


def _lazy(name: str, shape: Shape, vectors: Sequence[Tensor], places: Sequence[Place]) -> LazyTensor:
    dtype = vectors[0].dtype
    if dtype not in NAMES or any(vector.dtype != dtype or vector.dim() != 1 for vector in vectors):
        raise ShoalError(
            f"{name} must lie in vectors of one dtype, got {[str(vector.dtype) for vector in vectors][:4]}",
            fix="another checkpoint",
            code="E023",
        )
    read: Callable[[], Tensor] = partial(_read, vectors, places, shape)
    return LazyTensor(NAMES[dtype], shape, (Box((0,) * len(shape), shape, read),))


def _read(vectors: Sequence[Tensor], places: Sequence[Place], shape: Shape) -> Tensor:
    parts = [vectors[rank].narrow(0, first, length) for rank, first, length in places if length]
    return torch.cat(parts).view(shape) if parts else vectors[0].new_empty(shape)


def too_short(name: str, needed: int, there: int) -> ShoalError:
    """The error of partitions with fewer elements than the parameters need."""
    return ShoalError(
        f"{name} ends at element {needed:,} of the partitions, which have {there:,}",
        fix="the files of all ranks, from one save",
        code="E023",
    )
