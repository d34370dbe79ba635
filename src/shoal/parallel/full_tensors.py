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
    _boxes: dict[str, Box] = field(default_factory=dict)

    def is_replicated(self, name: str, axis: str) -> bool:
        """Whether all ranks along an axis hold the same piece of a parameter."""
        if axis in ("dp_shard", "cp"):
            return not self.is_sharded
        return {"tp": name not in self.tensor.cuts, "pp": False}.get(axis, True)

    def is_owner(self, name: str, besides: Sequence[str] = (), *, and_copies: bool = False) -> bool:
        """Whether this rank is the first of all that hold this very piece of a parameter: it counts and saves it.
        `besides`: axes along which it differs nevertheless; `and_copies`: second copies of tied ones differ, too."""
        axes = (axis for axis in AXES if axis not in besides)
        others = [axis for axis in axes if self.mesh.coordinate[axis] and self.is_replicated(name, axis)]
        return not others and (and_copies or name not in self.copies)

    def shard_box(self, name: str) -> Box:
        """Where this rank's piece of a parameter begins in the whole, and its shape."""
        if name not in self._boxes:
            self._boxes[name] = self._cut(name)
        return self._boxes[name]

    def _cut(self, name: str) -> Box:
        layout, rank, whole = self.plan.layout, self.mesh.rank, self.shapes[name]
        begin, shape = [0] * len(whole), list(whole)

        def cut(dim: int, index: int, degree: int) -> None:
            size = shape[dim]
            begin[dim] += min(size, -(-size // degree) * index)
            shape[dim] = chunk(size, index=index, degree=degree)

        if (dim := self.tensor.cuts.get(name)) is not None:
            cut(dim, self.tensor.index, self.tensor.degree)
        if name in self.experts:
            cut(0, layout.place(rank, "ep"), layout.ep)
        if self.is_sharded:
            axis = "edp" if name in self.experts else self.plan.shard_axis
            cut(0, layout.place(rank, axis), layout.degree(axis))
        return tuple(begin), tuple(shape)

    def joined(self, name: str, piece: Tensor) -> Tensor:
        """The pieces of the dp_shard, ep and tp ranks put together, on the CPU."""
        shape, mesh, tensor = self.shapes[name], self.mesh, self.tensor
        dim, is_expert = tensor.cuts.get(name), name in self.experts
        plain = to_local(piece)
        if self.is_sharded:
            num_rows = shape[0] // (self.plan.layout.ep if is_expert else 1)
            num_rows = chunk(num_rows, index=tensor.index, degree=tensor.degree) if dim == 0 else num_rows
            group = mesh.groups["edp" if is_expert else self.plan.shard_axis]
            plain = join(plain.to(mesh.device), 0, group, num_rows)
        if is_expert:
            plain = join(plain, 0, mesh.groups["ep"], shape[0])
        if dim is not None:
            plain = join(plain, dim, tensor.group, shape[dim])
        return plain.to("cpu", copy=True)


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
