"""Lazy tensors: dtype, shape, and boxes that can be read one at a time.

An exported or imported checkpoint may be larger than memory. So a tensor is a list of boxes, each of which is read when
it is written, and freed then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from torch import Tensor

from shoal.checkpoint.storage.manifest import SIZES, Shape
from shoal.checkpoint.storage.shard_file import DTYPES

BLOCK = 8 * 2**20
"""Bytes that are read at a time, unless a row is larger."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor, and a function that reads it."""

    begin: Shape
    shape: Shape
    read: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor, as boxes that fill it."""

    dtype: str
    """safetensors' name of it."""
    shape: Shape
    boxes: tuple[Box, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return prod(self.shape) * SIZES[self.dtype]


def in_memory(dtype: str, tensor: Tensor) -> LazyTensor:
    """Make a lazy tensor of one that is there. `dtype`: safetensors' name of its dtype."""
    shape = tuple(tensor.shape)
    return LazyTensor(dtype, shape, (Box((0,) * len(shape), shape, lambda: tensor),))


def by_rows(dtype: str, shape: Sequence[int], rows: Callable[[int, int], Tensor]) -> LazyTensor:
    """Make a tensor from a function that reads rows; one without dims is read by `rows(0, 1)`."""
    rest = tuple(shape[1:])
    boxes = tuple(
        Box((begin, *(0 for _ in rest)), (end - begin, *rest), partial(rows, begin, end)) if shape
        else Box((), (), partial(rows, begin, end))
        for begin, end in row_blocks(dtype, shape)
    )  # fmt: skip
    return LazyTensor(dtype, tuple(shape), boxes)


def row_blocks(dtype: str, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows to read at a time.

    >>> list(row_blocks("F32", (5, 2**20)))
    [(0, 2), (2, 4), (4, 5)]
    >>> list(row_blocks("F32", ()))
    [(0, 1)]
    """
    num_rows = shape[0] if shape else 1
    row = prod(shape[1:]) * SIZES[dtype]
    many = max(1, BLOCK // max(1, row))
    if not num_rows:
        yield 0, 0
    for begin in range(0, num_rows, many):
        yield begin, min(num_rows, begin + many)


def part_of(tensor: LazyTensor, begin: Shape, shape: Shape) -> LazyTensor:
    """A box of a tensor, without the first dim, which has length 1 there."""
    assert shape[0] == 1
    boxes = []
    for box in tensor.boxes:
        first = [max(own, other) for own, other in zip(begin, box.begin, strict=True)]
        sizes = zip(begin, shape, box.begin, box.shape, first, strict=True)
        extent = [min(own + length, other + size) - at for own, length, other, size, at in sizes]
        if all(size > 0 for size in extent):
            there = [at - other for at, other in zip(first, box.begin, strict=True)]
            where = tuple(slice(at, at + size) for at, size in zip(there, extent, strict=True))
            here = tuple(at - own for at, own in zip(first, begin, strict=True))
            boxes.append(Box(here[1:], tuple(extent[1:]), partial(_cut, box, (where[0].start, *where[1:]))))
    return LazyTensor(tensor.dtype, shape[1:], tuple(boxes))


def _cut(box: Box, where: tuple[int | slice, ...]) -> Tensor:
    return box.read()[where]


def full(tensor: LazyTensor) -> Tensor:
    """All values of a tensor."""
    out = torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype])
    for box in tensor.boxes:
        where = tuple(slice(b, b + s) for b, s in zip(box.begin, box.shape, strict=True))
        out[where] = box.read()
    return out


def derived(tensor: LazyTensor, shape: Shape, compute: Callable[[Tensor], Tensor]) -> LazyTensor:
    """A tensor of the same dtype that is computed from all values of another one when it is read."""

    def read() -> Tensor:
        return compute(full(tensor)).contiguous()

    return LazyTensor(tensor.dtype, shape, (Box((0,) * len(shape), shape, read),))
