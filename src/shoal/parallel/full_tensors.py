"""Which piece of each parameter a rank holds, and how pieces are put together again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.blueprint.layout import AXES
from shoal.blueprint.placement import chunk
from shoal.blueprint.plan import Plan
from shoal.comm.collectives import all_gather_plain, join
from shoal.comm.mesh import Mesh
from shoal.numerics.local_tensor import to_local
from shoal.numerics.precision import wide
from shoal.parallel.tensor import TensorParallel
from shoal.parallel.tensor_parts.packed import in_order, ranges

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a piece begins in the whole tensor, and its shape."""


@dataclass
class TensorPlacement:
    """Where the pieces of all parameters lie. Parameters go by the names that they have on one device."""

    plan: Plan
    mesh: Mesh
    tensor: TensorParallel
    is_sharded: bool
    experts: frozenset[str]
    """Parameters that are divided over ep."""
    shapes: Mapping[str, tuple[int, ...]]
    """Every parameter's whole shape; one that has two names is there twice."""
    copies: Collection[str] = ()
    """Second names of tied parameters, of which another stage has a copy of its own."""
    _boxes: dict[str, tuple[Box, ...]] = field(default_factory=dict)

    def is_cut(self, name: str) -> bool:
        """Whether `zero` cuts a parameter: one of shape () has no dim to cut."""
        return self.is_sharded and bool(self.shapes[name])

    def is_replicated(self, name: str, axis: str) -> bool:
        """Whether all ranks along an axis hold the same piece of a parameter."""
        if axis in ("dp_shard", "cp"):
            return not self.is_cut(name)
        return {"tp": name not in self.tensor.cuts, "pp": False}.get(axis, True)

    def is_owner(self, name: str, besides: Sequence[str] = (), *, and_copies: bool = False) -> bool:
        """Whether this rank is the first of all that hold this very piece of a parameter: it counts and saves it.
        `besides`: axes along which it differs nevertheless; `and_copies`: second copies of tied ones differ, too."""
        axes = (axis for axis in AXES if axis not in besides)
        others = [axis for axis in axes if self.mesh.coordinate[axis] and self.is_replicated(name, axis)]
        return not others and (and_copies or name not in self.copies)

    def shard_boxes(self, name: str) -> tuple[Box, ...]:
        """Where this rank's piece of a parameter begins in the whole, and its shape. The piece of a packed layer is
        several boxes, one after the other along the dim that tp cuts."""
        if name not in self._boxes:
            self._boxes[name] = tuple(self._cut(name))
        return self._boxes[name]

    def boxes_of(self, name: str, piece: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """A rank's piece of a parameter, or a tensor of its shape, box by box: where it begins in the whole, and a
        view."""
        first, dim = 0, self.tensor.cuts.get(name, 0)
        boxes = self.shard_boxes(name)
        for begin, shape in boxes:
            yield begin, piece if len(boxes) == 1 else piece.narrow(dim, first, shape[dim])
            first += shape[dim] if shape else 0

    def _cut(self, name: str) -> Iterator[Box]:
        layout, rank, whole = self.plan.layout, self.mesh.rank, self.shapes[name]
        dim, parts = self.tensor.cuts.get(name), self.tensor.parts.get(name, ())
        begin, shape = [0] * len(whole), list(whole)
        own = [(0, whole[dim or 0])] if whole else [(0, 1)]
        if dim is not None:
            own = list(ranges(whole[dim], parts, index=self.tensor.index, degree=self.tensor.degree))
            shape[dim] = sum(size for _, size in own)

        def cut(index: int, degree: int) -> None:
            size = shape[0]
            begin[0] += min(size, -(-size // degree) * index)
            shape[0] = chunk(size, index=index, degree=degree)

        if name in self.experts:
            cut(layout.place(rank, "ep"), layout.ep)
        if self.is_cut(name):
            axis = "edp" if name in self.experts else self.plan.shard_axis
            cut(layout.place(rank, axis), layout.degree(axis))
        yield from _placed(begin, shape, dim, own)

    def joined(self, name: str, piece: Tensor) -> Tensor:
        """The pieces of the dp_shard, ep and tp ranks put together, on the CPU."""
        shape, mesh, tensor = self.shapes[name], self.mesh, self.tensor
        dim, is_expert = tensor.cuts.get(name), name in self.experts
        plain = to_local(piece)
        if self.is_cut(name):
            num_rows = shape[0] // (self.plan.layout.ep if is_expert else 1)
            num_rows = chunk(num_rows, index=tensor.index, degree=tensor.degree) if dim == 0 else num_rows
            group = mesh.groups["edp" if is_expert else self.plan.shard_axis]
            plain = join(plain.to(mesh.device), 0, group, num_rows)
        if is_expert:
            plain = join(plain, 0, mesh.groups["ep"], shape[0])
        if dim is not None:
            plain = join(plain, dim, tensor.group, shape[dim])
            plain = in_order(plain, dim, tensor.parts.get(name, ()), tensor.degree)
        return plain.to("cpu", copy=True)


def _placed(begin: list[int], shape: list[int], dim: int | None, own: list[tuple[int, int]]) -> Iterator[Box]:
    """Boxes of a shard of a piece. `own`: the ranges of the whole that the piece has along a dim, one after the other;
    `begin` and `shape` are those inside the piece."""
    if dim is None:
        yield tuple(begin), tuple(shape)
        return
    first, found = 0, []
    for start, size in own:
        low, high = max(begin[dim], first), min(begin[dim] + shape[dim], first + size)
        if low < high or len(own) == 1:
            at, sizes = list(begin), list(shape)
            at[dim], sizes[dim] = start + low - first, max(0, high - low)
            found.append((tuple(at), tuple(sizes)))
        first += size
    yield from found or [(tuple(begin), tuple(shape))]


def full_tensors(
    place: TensorPlacement, named: Mapping[str, nn.Parameter], what: str, stages: dist.ProcessGroup | None
) -> Iterator[tuple[str, Tensor | None]]:
    """Every parameter ("weight") or its gradient ("gradient") under its name, whole and on the CPU of rank 0; None on
    the other ranks, which all have to go through it too. `stages`: the ranks of a pipeline; None: there is none."""
    owners = _owners([name for name in named if name not in place.copies], stages)
    for name in place.shapes:
        if name in owners:
            yield name, _on_rank_0(place, named, name, what, owners[name])


def from_all_stages(own: Mapping[str, Tensor], stages: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Small tensors of every stage, on the CPU; every rank has to call it."""
    mine = {name: value.to("cpu", copy=True) for name, value in own.items()}  # the next step changes them
    if stages is None:
        return mine
    return {name: value for stage in all_gather_plain(mine, stages) for name, value in stage.items()}


def _owners(mine: list[str], stages: dist.ProcessGroup | None) -> dict[str, int]:
    """Name → the place on the pp axis that gathers it. A tied parameter goes by its first name alone."""
    if stages is None:
        return dict.fromkeys(mine, 0)
    return {name: place for place, names in enumerate(all_gather_plain(mine, stages)) for name in names}


def _on_rank_0(
    place: TensorPlacement, named: Mapping[str, nn.Parameter], name: str, what: str, owner: int
) -> Tensor | None:
    mesh = place.mesh
    full = place.joined(name, _piece(named[name], what)) if mesh.coordinate["pp"] == owner else None
    if owner == 0:
        return full if mesh.rank == 0 else None
    source = mesh.layout.rank(pp=owner)
    if mesh.rank == source:
        assert full is not None
        dist.send(full.to(mesh.comm_device, wide(full.dtype)), 0)
    elif mesh.rank == 0:
        example = next(iter(named.values()))
        full = torch.empty(place.shapes[name], dtype=wide(example.dtype), device=mesh.comm_device)
        dist.recv(full, source)
        return full.cpu()
    return None


def _piece(parameter: nn.Parameter, what: str) -> Tensor:
    """A parameter without a gradient has a zero one."""
    if what == "weight":
        return parameter.detach()
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
