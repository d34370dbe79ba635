"""Compare two checkpoints tensor by tensor, whatever layouts wrote them.

Both are read in the same rows, so that only some rows of either are in memory. Values are compared as numbers: a NaN
equals a NaN, and tensors of two dtypes are compared in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.formats.lazy_tensor import row_blocks
from shoal.checkpoint.full_tensor import FullTensors
from shoal.checkpoint.storage.locate import SavedStep
from shoal.checkpoint.storage.manifest import Entry


@dataclass(frozen=True)
class Difference:
    """The difference of one tensor."""

    name: str
    kinds: tuple[str, str]
    """Dtype and shape in the first and in the second step."""
    num_elements: int = 0
    num_different: int | None = None
    """Elements that differ; None: the shapes differ, and nothing was compared."""
    max_abs: float = 0.0
    relative: float = inf
    """Norm of the difference, divided by the larger norm."""
    num_nans: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Comparison:
    """All differences of two steps."""

    differences: tuple[Difference, ...]
    """The largest first."""
    only: tuple[tuple[str, ...], tuple[str, ...]]
    """Tensors of the first step only, and of the second only."""
    num_equal: int
    state: tuple[tuple[str, Any, Any], ...]
    """Other state that differs: key, first and second value."""

    @property
    def is_equal(self) -> bool:
        """Whether both have the same tensors. Other state does not count: another plan may have written the same."""
        return not self.differences and not any(self.only)


def compare(first: SavedStep, second: SavedStep, *, weights_only: bool, progress: Callable[[int], None]) -> Comparison:
    """Compare two steps; `progress` is called with the bytes of each part of the first."""
    left, right = (_tensors(step, weights_only) for step in (first, second))
    shared = [name for name in left if name in right]
    found: list[Difference] = []
    with FullTensors(first) as one, FullTensors(second) as other:
        for name in shared:
            difference = _compare(one, other, name, progress)
            if difference is not None:
                found.append(difference)
    return Comparison(
        differences=tuple(sorted(found, key=lambda d: (d.num_different is not None, -d.relative, -d.max_abs, d.name))),
        only=(tuple(name for name in left if name not in right), tuple(name for name in right if name not in left)),
        num_equal=len(shared) - len(found),
        state=tuple(_changed({"step": first.manifest.step, **first.manifest.state},
                             {"step": second.manifest.step, **second.manifest.state})),
    )  # fmt: skip


def _tensors(step: SavedStep, weights_only: bool) -> dict[str, Entry]:
    return {
        name: entry for name, entry in step.manifest.tensors.items() if not weights_only or name.startswith("model/")
    }


def _compare(one: FullTensors, other: FullTensors, name: str, progress: Callable[[int], None]) -> Difference | None:
    left, right = one.manifest.tensors[name], other.manifest.tensors[name]
    kinds = (f"{left.dtype} {list(left.shape)}", f"{right.dtype} {list(right.shape)}")
    if left.shape != right.shape:
        return Difference(name, kinds)
    num_different, max_abs, squares, nans = 0, 0.0, [0.0, 0.0, 0.0], [0, 0]
    for begin, end in row_blocks("F64", left.shape):  # the dtype of the comparison
        a, b = one.rows(name, begin, end), other.rows(name, begin, end)
        progress(a.numel() * a.element_size())
        here = _Part.of(a, b)
        num_different, max_abs = num_different + here.num_different, max(max_abs, here.max_abs)
        squares = [x + y for x, y in zip(squares, here.squares, strict=True)]
        nans = [x + y for x, y in zip(nans, here.num_nans, strict=True)]
    if not num_different and left.dtype == right.dtype:
        return None
    norm = sqrt(max(squares[1:]))
    relative = sqrt(squares[0]) / norm if norm else 0.0
    return Difference(
        name, kinds, prod(left.shape), num_different, max_abs, relative if relative == relative else inf,
        (nans[0], nans[1]),
    )  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """Sums over some rows of a tensor."""

    num_different: int
    max_abs: float
    squares: tuple[float, float, float]
    """Of the difference, of the first, of the second."""
    num_nans: tuple[int, int]

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> _Part:
        x, y = a.to(torch.float64), b.to(torch.float64)
        nans = (x.isnan(), y.isnan())
        same = (a == b) if not a.dtype.is_floating_point and a.dtype == b.dtype else (x == y)
        same |= nans[0] & nans[1]
        apart = torch.where(same, 0.0, (x - y).abs()).nan_to_num(nan=inf, posinf=inf)
        return cls(
            num_different=int((~same).sum()),
            max_abs=float(apart.max()) if apart.numel() else 0.0,
            squares=(float(apart.square().sum()), _square(x), _square(y)),
            num_nans=(int(nans[0].sum()), int(nans[1].sum())),
        )


def _square(x: Tensor) -> float:
    return float(x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum())


def _changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield what differs between two trees, by the path of its key; counters of parameters last, since they are
    many."""
    left, right = dict(_leaves(one)), dict(_leaves(other))
    for key in sorted(left.keys() | right.keys(), key=lambda key: (key.startswith("scalars/"), key)):
        if left.get(key) != right.get(key):
            yield key, left.get(key), right.get(key)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}" if path else str(key))
    else:
        yield path, tree
