"""Collectives carried out message by message, as `shoal.blueprint.collectives.steps` lists them, by torch's
point-to-point ops.

A large tensor is cut into lanes, each of which goes through all rounds on its own. While one lane adds up what has
arrived, the messages of the others travel:

    lane 0    send ─ add ─ send ─ add ─ ...
    lane 1         send ─ add ─ send ─ add ─ ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.blueprint.collectives.algorithms import Algorithm, Blocks, Kind, Move
from shoal.blueprint.collectives.steps import Steps, cut, offsets, steps

Op = Literal["sum", "avg", "max"]
LANE_BYTES = 16 * 2**20
"""Of a lane, about: enough for a message to be worth its latency."""
MOST_LANES = 2
"""Two hide adding behind a slow wire. More are slower where ranks share the cores that carry their messages."""


@dataclass
class Counted:
    """What this rank has sent."""

    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Stepped:
    """Collectives over a group, by one algorithm. None: this process alone."""

    group: dist.ProcessGroup | None
    algorithm: Algorithm = "ring"
    segments: int = 4
    """Pieces that trees and chains pass on one after the other."""
    node: int | None = None
    """Ranks of a node, for the hierarchical one."""
    lanes: int | None = None
    """Pieces that go through all rounds on their own; None: by size."""
    counted: Counted = field(default_factory=Counted)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Tensor:
        """The sum, mean or largest over all ranks, in place; returns it."""
        flat = _flat(x)
        pieces = [self._lane("all_reduce", part, op) for part in self._cut(flat)]
        _carry_out(pieces)
        if op == "avg":
            flat /= self.size
        return x

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """What the root has, in place on every rank; returns it."""
        _carry_out([self._lane("broadcast", part, "sum", root=root) for part in self._cut(_flat(x))])
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """What all ranks have, which is of one shape, joined along the first dim. A single number counts as one row."""
        own = _flat(x)
        full = own.new_empty(self.size * own.numel())
        role = self._role("all_gather", full.numel())
        at = offsets([own.numel()] * self.size)
        full[at[self.rank] : at[self.rank + 1]] = own
        _carry_out([_Lane(self, role, _InPlace(full, role.steps), None)])
        return full.view(self.size * x.shape[0], *x.shape[1:]) if x.dim() else full

    def reduce_scatter(self, x: Tensor, op: Op = "sum") -> Tensor:
        """This rank's part of the sum, mean or largest over all ranks: as the elements are cut, the larger first."""
        full = _flat(x).clone()
        role = self._role("reduce_scatter", full.numel())
        _carry_out([_Lane(self, role, _InPlace(full, role.steps), _COMBINED[op])])
        at = offsets(cut(full.numel(), self.size))
        mine = full[at[self.rank] : at[self.rank + 1]].clone()
        return mine / self.size if op == "avg" else mine

    def all_to_all(self, x: Tensor) -> Tensor:
        """Part t of what this rank has goes to rank t; returns what all ranks have for this one, in their order. Parts
        are cut as `reduce_scatter` cuts them."""
        own = _flat(x)
        role = self._role("all_to_all", own.numel())
        blocks = _Scattered(own, role.steps, self.rank)
        _carry_out([_Lane(self, role, blocks, None)])
        return blocks.arrived

    def _role(self, kind: Kind, size: int, root: int = 0) -> _Role:
        return _role(kind, self.algorithm, self.size, size, root, self.segments, self.node, self.rank)

    def _lane(self, kind: Kind, part: Tensor, op: Op, root: int = 0) -> _Lane:
        role = self._role(kind, part.numel(), root)
        return _Lane(self, role, _InPlace(part, role.steps), _COMBINED[op])

    def _cut(self, flat: Tensor) -> list[Tensor]:
        wanted = flat.numel() * flat.element_size() // LANE_BYTES
        count = self.lanes or max(1, min(MOST_LANES, wanted))
        return list(flat.split(cut(flat.numel(), count)))


Combine = Callable[[Tensor, Tensor], Any]
_COMBINED: dict[Op, Combine] = {
    "sum": lambda own, other: own.add_(other),
    "avg": lambda own, other: own.add_(other),
    "max": lambda own, other: torch.maximum(own, other, out=own),
}


def _flat(x: Tensor) -> Tensor:
    assert x.is_contiguous(), "a collective in place needs a tensor that lies in one piece"
    return x.detach().view(-1)


@dataclass(frozen=True, slots=True)
class _Role:
    """What one rank does in a collective, round by round."""

    steps: Steps
    receives: tuple[tuple[Move, ...], ...]
    sends: tuple[tuple[Move, ...], ...]


@lru_cache(maxsize=64)  # training asks for the same few again and again, and a list takes longer than a short message
def _role(
    kind: Kind, algorithm: Algorithm, world: int, size: int, root: int, segments: int, node: int | None, rank: int
) -> _Role:
    listed = steps(kind, algorithm, world, size, root=root, segments=segments, node=node)
    return _Role(
        listed,
        tuple(tuple(move for move in moves if move.target == rank) for moves in listed.rounds),
        tuple(tuple(move for move in moves if move.source == rank) for moves in listed.rounds),
    )


def _carry_out(lanes: Sequence[_Lane]) -> None:
    """All rounds of all lanes, in turns."""
    for number in range(max((len(lane.role.sends) for lane in lanes), default=0) + 1):
        for lane in lanes:
            lane.finish()
            if number < len(lane.role.sends):
                lane.begin(number)


class _InPlace:
    """Blocks that lie in one tensor, one after the other."""

    def __init__(self, full: Tensor, listed: Steps) -> None:
        self.full, self.at = full, offsets(listed.sizes)

    def to_send(self, blocks: Blocks) -> Tensor:
        """What they hold, in one piece."""
        runs = self._runs(blocks)
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def place_for(self, blocks: Blocks) -> Tensor | None:
        """Where what arrives for them may be put as it comes; None: it has to be taken apart."""
        runs = self._runs(blocks)
        return runs[0] if len(runs) == 1 else None

    def put(self, blocks: Blocks, arrived: Tensor, combine: Combine | None) -> None:
        """What has arrived, in place of what was there, or with it."""
        begin = 0
        for run in self._runs(blocks):
            part = arrived[begin : begin + run.numel()]
            begin += run.numel()
            if combine is None:
                run.copy_(part)
            else:
                combine(run, part)

    def _runs(self, blocks: Blocks) -> list[Tensor]:
        """The blocks, neighbours as one."""
        runs: list[list[int]] = []
        for block in blocks:
            if runs and runs[-1][1] == block:
                runs[-1][1] = block + 1
            else:
                runs.append([block, block + 1])
        return [self.full[self.at[first] : self.at[last]] for first, last in runs]


class _Scattered:
    """Blocks of an all-to-all: own ones, those that are for this rank, and those that are only passed on."""

    def __init__(self, own: Tensor, listed: Steps, rank: int) -> None:
        self.own, self.world, self.rank, self.sizes = own, listed.world, rank, listed.sizes
        parts = own.split(list(listed.sizes[: self.world]))
        self.blocks_here: dict[int, Tensor] = {rank * self.world + target: part for target, part in enumerate(parts)}
        self.at = offsets([listed.sizes[source * self.world + rank] for source in range(self.world)])
        self.arrived = own.new_empty(self.at[-1])
        """What is for this rank, in the order of those who have sent it."""
        self._for_me(rank * self.world + rank).copy_(parts[rank])

    def to_send(self, blocks: Blocks) -> Tensor:
        """What they hold, in one piece."""
        return (
            self.blocks_here[blocks[0]]
            if len(blocks) == 1
            else torch.cat([self.blocks_here[block] for block in blocks])
        )

    def place_for(self, blocks: Blocks) -> Tensor | None:
        """Where it belongs, if it is one block for this rank."""
        return self._for_me(blocks[0]) if len(blocks) == 1 and blocks[0] % self.world == self.rank else None

    def put(self, blocks: Blocks, arrived: Tensor, combine: Combine | None) -> None:
        """What has arrived: here it stays, or waits to be passed on."""
        for block, part in zip(blocks, arrived.split([self.sizes[block] for block in blocks]), strict=True):
            if block % self.world == self.rank:
                self._for_me(block).copy_(part)
            else:
                self.blocks_here[block] = part

    def _for_me(self, block: int) -> Tensor:
        source = block // self.world
        return self.arrived[self.at[source] : self.at[source + 1]]


class _Lane:
    """A list of messages on its way."""

    def __init__(self, over: Stepped, role: _Role, blocks: _InPlace | _Scattered, combine: Combine | None) -> None:
        self.over, self.role, self.blocks, self.combine = over, role, blocks, combine
        self.dtype_of = blocks.full if isinstance(blocks, _InPlace) else blocks.own
        self._works: list[Any] = []
        self._arriving: list[tuple[Move, Tensor, bool]] = []
        self._sending: list[Tensor] = []
        self._room: Tensor | None = None

    def begin(self, number: int) -> None:
        """Send off this rank's messages of a round, and expect those of others."""
        group = self.over.group
        for move in self.role.receives[number]:
            room, is_there = self._place(move)
            self._works.append(dist.irecv(room, group=group, group_src=move.source))
            self._arriving.append((move, room, is_there))
        for move in self.role.sends[number]:
            data = self.blocks.to_send(move.blocks)
            self._sending.append(data)  # until it has gone
            self._works.append(dist.isend(data, group=group, group_dst=move.target))
            self.over.counted.messages += 1
            self.over.counted.bytes += data.numel() * data.element_size()

    def _place(self, move: Move) -> tuple[Tensor, bool]:
        """Room for what a message brings, and whether that is where it belongs. What is added up arrives in one room in
        all rounds: fresh memory has to be cleared by the system first, which takes as long as adding."""
        place = None if move.adds else self.blocks.place_for(move.blocks)
        if place is not None:
            return place, True
        size = self.role.steps.elements(move)
        if not move.adds:
            return self.dtype_of.new_empty(size), False
        if self._room is None or self._room.numel() < size:
            self._room = self.dtype_of.new_empty(size)
        return self._room[:size], False

    def finish(self) -> None:
        """Wait for the messages that are on their way, and put what has arrived where it belongs."""
        for work in self._works:
            work.wait()
        for move, room, is_there in self._arriving:
            if not is_there:
                self.blocks.put(move.blocks, room, self.combine if move.adds else None)
        self._works, self._arriving, self._sending = [], [], []
