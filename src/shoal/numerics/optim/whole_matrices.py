"""Compute something of whole matrices whose rows are sharded over ranks, each matrix on one rank.

Three matrices A, B and C over two ranks; A and C belong to rank 0, B to rank 1:

              shards         all-to-all [1]     compute [2]     all-to-all [3]
    rank 0    a0 b0 c0   ──▶   a0+a1  c0+c1   ──▶   A'  C'    ──▶   a0' b0' c0'
    rank 1    a1 b1 c1   ──▶   b0+b1          ──▶   B'        ──▶   a1' b1' c1'

Each matrix is computed once, and a rank sends and receives its share of all bytes twice: no rank ever holds all
matrices. They are dealt out in order of their size, so that ranks get about the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.collectives import part_size
from shoal.numerics.local_tensor import is_dtensor

_all_to_all: Any = dist.all_to_all_single
Function = Callable[[Tensor], Tensor]


def shard_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that hold the shards of a parameter; None: it is whole. Replicas of shards are other groups."""
    if not is_dtensor(parameter):
        return None
    cut = [(dim, placement) for dim, placement in enumerate(parameter.placements) if placement.is_shard()]
    assert len(cut) <= 1, f"sharded along {len(cut)} axes of a mesh"
    assert all(placement.is_shard(0) for _, placement in cut), "sharded by something else than rows"
    group = parameter.device_mesh.get_group(cut[0][0]) if cut else None
    return group if group is not None and group.size() > 1 else None


def apply_to_whole(function: Function, parameters: Sequence[Tensor], shards: Sequence[Tensor]) -> list[Tensor]:
    """Apply a function of a whole matrix, whose result has its shape, to all matrices of an optimizer step.

    `shards` are this rank's rows of the matrices, which are cut as the `parameters` are; so is the result.
    """
    found = list(shards)
    together: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = {}
    for number, (parameter, shard) in enumerate(zip(parameters, shards, strict=True)):
        group = shard_group(parameter)
        if group is None:
            found[number] = function(shard)
        else:
            together.setdefault((group, shard.dtype), []).append(number)
    for (group, _), numbers in together.items():
        exchange = _Exchange.of([tuple(parameters[number].shape) for number in numbers], group)
        results = exchange.apply(function, [shards[number] for number in numbers])
        for number, result in zip(numbers, results, strict=True):
            found[number] = result
    return found


@dataclass(frozen=True)
class _Exchange:
    """Which rank owns which matrix."""

    shapes: list[tuple[int, ...]]
    group: dist.ProcessGroup
    owned: list[list[int]]
    """Rank of the group → the numbers of its matrices."""

    @classmethod
    def of(cls, shapes: list[tuple[int, ...]], group: dist.ProcessGroup) -> _Exchange:
        by_size = sorted(range(len(shapes)), key=lambda number: -shapes[number][0] * shapes[number][1])
        return cls(shapes, group, [by_size[rank :: group.size()] for rank in range(group.size())])

    def apply(self, function: Function, shards: list[Tensor]) -> list[Tensor]:
        device = _comm_device(shards[0].device, self.group)
        mine = self.owned[dist.get_rank(self.group)]
        to_owners = [[shards[number] for number in numbers] for numbers in self.owned]
        rows = [self._rows(mine, rank) for rank in range(len(self.owned))]
        received = self._send(to_owners, rows, shards[0], device)  # [1]
        wholes = [torch.cat([parts[place] for parts in received]) for place in range(len(mine))]
        results = [function(whole) for whole in wholes]  # [2]
        cut = [result.split([shape[place][0] for shape in rows]) for place, result in enumerate(results)]
        back = [[parts[rank] for parts in cut] for rank in range(len(self.owned))]
        own = [[tuple(shards[number].shape) for number in numbers] for numbers in self.owned]
        found = self._send(back, own, shards[0], device)  # [3]
        by_number = {
            number: shard
            for numbers, of_owner in zip(self.owned, found, strict=True)
            for number, shard in zip(numbers, of_owner, strict=True)
        }
        return [by_number[number].to(shards[0].device) for number in range(len(shards))]

    def _rows(self, numbers: list[int], rank: int) -> list[tuple[int, ...]]:
        """The shapes of a rank's shards of some matrices."""
        degree = len(self.owned)
        return [
            (part_size(self.shapes[number][0], index=rank, degree=degree), *self.shapes[number][1:])
            for number in numbers
        ]

    def _send(
        self, tensors: list[list[Tensor]], shapes: list[list[tuple[int, ...]]], like: Tensor, device: torch.device
    ) -> list[list[Tensor]]:
        """Send a list of tensors to each rank; return those that came from each, in the given shapes."""
        flat = [
            torch.cat([tensor.reshape(-1) for tensor in each] or [like.new_empty(0)]).to(device) for each in tensors
        ]
        sizes = [[rows * columns for rows, columns in each] for each in shapes]
        totals = [sum(each) for each in sizes]
        received = torch.empty(sum(totals), dtype=like.dtype, device=device)
        _all_to_all(received, torch.cat(flat), totals, [part.numel() for part in flat], group=self.group)
        return [
            [piece.view(shape) for piece, shape in zip(part.split(split), of_rank, strict=True)]
            for part, split, of_rank in zip(received.split(totals), sizes, shapes, strict=True)
        ]


def _comm_device(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """The device that shards are sent from, and computed on: the GPU of NCCL, also for shards in host memory. gloo has
    no all-to-all for CUDA tensors."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return device if device.type != "cuda" else torch.device("cpu")
