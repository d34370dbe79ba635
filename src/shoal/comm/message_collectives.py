"""Collectives carried out message by message, as `shoal.blueprint.collectives.steps` lists them.

They use torch's point-to-point ops. A large tensor is cut into chunks, each of which runs through all rounds on its
own. While one chunk adds what it received, the messages of the others are in flight:

    chunk 0    send ─ add ─ send ─ add ─ ...
    chunk 1         send ─ add ─ send ─ add ─ ...
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
CHUNK_BYTES = 16 * 2**20
"""Approximate size of a chunk: large enough that a message is worth its latency."""
MOST_CHUNKS = 2
"""Two hide the additions behind a slow link. More are slower where ranks share the cores that carry their messages."""


@dataclass
class Counted:
    """Messages and bytes that this rank has sent."""

    messages: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class MessageCollectives:
    """Collectives over a group, by one algorithm. A group of None: this process alone."""

    group: dist.ProcessGroup | None
    algorithm: Algorithm = "ring"
    segments: int = 4
    """Pieces that trees and chains forward one after the other."""
    node: int | None = None
    """Ranks per node, for the hierarchical algorithm."""
    chunks: int | None = None
    """Chunks that run through all rounds on their own; None: chosen by size."""
    counted: Counted = field(default_factory=Counted)

    @property
    def size(self) -> int:
        """The number of ranks of the group."""
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def all_reduce(self, x: Tensor, op: Op = "sum") -> Tensor:
        """Reduce over all ranks by sum, mean or maximum, in place; return the tensor."""
        flat = _flat(x)
        pieces = [self._chunk("all_reduce", part, op) for part in self._cut(flat)]
        _carry_out(pieces)
        if op == "avg":
            flat /= self.size
        return x

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Copy the root's tensor to every rank, in place; return it."""
        _carry_out([self._chunk("broadcast", part, "sum", root=root) for part in self._cut(_flat(x))])
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Join the tensors of all ranks, of one shape, along the first dim. A scalar counts as one row."""
        own = _flat(x)
        full = own.new_empty(self.size * own.numel())
        role = self._role("all_gather", full.numel())
        at = offsets([own.numel()] * self.size)
        full[at[self.rank] : at[self.rank + 1]] = own
        _carry_out([_Chunk(self, role, _InPlace(full, role.steps), None)])
        return full.view(self.size * x.shape[0], *x.shape[1:]) if x.dim() else full

    def reduce_scatter(self, x: Tensor, op: Op = "sum") -> Tensor:
        """Return this rank's part of the sum, mean or maximum over all ranks. Larger parts come first."""
        full = _flat(x).clone()
        role = self._role("reduce_scatter", full.numel())
        _carry_out([_Chunk(self, role, _InPlace(full, role.steps), _COMBINED[op])])
        at = offsets(cut(full.numel(), self.size))
        mine = full[at[self.rank] : at[self.rank + 1]].clone()
        return mine / self.size if op == "avg" else mine

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send part t of the tensor to rank t; return the parts that all ranks sent to this one, in rank order. Parts
        are cut as in `reduce_scatter`."""
        own = _flat(x)
        role = self._role("all_to_all", own.numel())
        blocks = _Scattered(own, role.steps, self.rank)
        _carry_out([_Chunk(self, role, blocks, None)])
        return blocks.arrived

    def _role(self, kind: Kind, size: int, root: int = 0) -> _Role:
        return _role(kind, self.algorithm, self.size, size, root, self.segments, self.node, self.rank)

    def _chunk(self, kind: Kind, part: Tensor, op: Op, root: int = 0) -> _Chunk:
        role = self._role(kind, part.numel(), root)
        return _Chunk(self, role, _InPlace(part, role.steps), _COMBINED[op])

    def _cut(self, flat: Tensor) -> list[Tensor]:
        wanted = flat.numel() * flat.element_size() // CHUNK_BYTES
        count = self.chunks or max(1, min(MOST_CHUNKS, wanted))
        return list(flat.split(cut(flat.numel(), count)))


Combine = Callable[[Tensor, Tensor], Any]
_COMBINED: dict[Op, Combine] = {
    "sum": lambda own, other: own.add_(other),
    "avg": lambda own, other: own.add_(other),
    "max": lambda own, other: torch.maximum(own, other, out=own),
}


def _flat(x: Tensor) -> Tensor:
    assert x.is_contiguous(), "an in-place collective needs a contiguous tensor"
    return x.detach().view(-1)


@dataclass(frozen=True, slots=True)
class _Role:
    """The messages of one rank in a collective, by round."""

    steps: Steps
    receives: tuple[tuple[Move, ...], ...]
    sends: tuple[tuple[Move, ...], ...]


@lru_cache(maxsize=64)  # training repeats the same few, and building a list takes longer than a short message
def _role(
    kind: Kind, algorithm: Algorithm, world: int, size: int, root: int, segments: int, node: int | None, rank: int
) -> _Role:
    listed = steps(kind, algorithm, world, size, root=root, segments=segments, node=node)
    return _Role(
        listed,
        tuple(tuple(move for move in moves if move.target == rank) for moves in listed.rounds),
        tuple(tuple(move for move in moves if move.source == rank) for moves in listed.rounds),
    )


def _carry_out(chunks: Sequence[_Chunk]) -> None:
    """Run all rounds of all chunks, interleaved."""
    for number in range(max((len(chunk.role.sends) for chunk in chunks), default=0) + 1):
        for chunk in chunks:
            chunk.finish()
            if number < len(chunk.role.sends):
                chunk.begin(number)


class _InPlace:
    """Blocks that are adjacent in one tensor."""

    def __init__(self, full: Tensor, listed: Steps) -> None:
        self.full, self.at = full, offsets(listed.sizes)

    def to_send(self, blocks: Blocks) -> Tensor:
        """Return the content of blocks as one tensor."""
        runs = self._runs(blocks)
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    def place_for(self, blocks: Blocks) -> Tensor | None:
        """Return the memory into which blocks can be received directly; None: they are not adjacent."""
        runs = self._runs(blocks)
        return runs[0] if len(runs) == 1 else None

    def put(self, blocks: Blocks, arrived: Tensor, combine: Combine | None) -> None:
        """Copy received blocks into place, or combine them with the blocks there."""
        begin = 0
        for run in self._runs(blocks):
            part = arrived[begin : begin + run.numel()]
            begin += run.numel()
            if combine is None:
                run.copy_(part)
            else:
                combine(run, part)

    def _runs(self, blocks: Blocks) -> list[Tensor]:
        """Return the blocks, adjacent ones merged."""
        runs: list[list[int]] = []
        for block in blocks:
            if runs and runs[-1][1] == block:
                runs[-1][1] = block + 1
            else:
                runs.append([block, block + 1])
        return [self.full[self.at[first] : self.at[last]] for first, last in runs]


class _Scattered:
    """Blocks of an all-to-all: this rank's own, those addressed to it, and those that it forwards."""

    def __init__(self, own: Tensor, listed: Steps, rank: int) -> None:
        self.own, self.world, self.rank, self.sizes = own, listed.world, rank, listed.sizes
        parts = own.split(list(listed.sizes[: self.world]))
        self.blocks_here: dict[int, Tensor] = {rank * self.world + target: part for target, part in enumerate(parts)}
        self.at = offsets([listed.sizes[source * self.world + rank] for source in range(self.world)])
        self.arrived = own.new_empty(self.at[-1])
        """The blocks addressed to this rank, in the order of their sources."""
        self._for_me(rank * self.world + rank).copy_(parts[rank])

    def to_send(self, blocks: Blocks) -> Tensor:
        """Return the content of blocks as one tensor."""
        return (
            self.blocks_here[blocks[0]]
            if len(blocks) == 1
            else torch.cat([self.blocks_here[block] for block in blocks])
        )

    def place_for(self, blocks: Blocks) -> Tensor | None:
        """Return the block's final memory if it is one block addressed to this rank."""
        return self._for_me(blocks[0]) if len(blocks) == 1 and blocks[0] % self.world == self.rank else None

    def put(self, blocks: Blocks, arrived: Tensor, combine: Combine | None) -> None:
        """Store received blocks: in their final memory, or until they are forwarded."""
        for block, part in zip(blocks, arrived.split([self.sizes[block] for block in blocks]), strict=True):
            if block % self.world == self.rank:
                self._for_me(block).copy_(part)
            else:
                self.blocks_here[block] = part

    def _for_me(self, block: int) -> Tensor:
        source = block // self.world
        return self.arrived[self.at[source] : self.at[source + 1]]


class _Chunk:
    """A chunk and its messages in flight."""

    def __init__(
        self, over: MessageCollectives, role: _Role, blocks: _InPlace | _Scattered, combine: Combine | None
    ) -> None:
        self.over, self.role, self.blocks, self.combine = over, role, blocks, combine
        self.dtype_of = blocks.full if isinstance(blocks, _InPlace) else blocks.own
        self._works: list[Any] = []
        self._arriving: list[tuple[Move, Tensor, bool]] = []
        self._sending: list[Tensor] = []
        self._room: Tensor | None = None

    def begin(self, number: int) -> None:
        """Start to send and receive this rank's messages of a round."""
        group = self.over.group
        for move in self.role.receives[number]:
            room, is_there = self._place(move)
            self._works.append(dist.irecv(room, group=group, group_src=move.source))
            self._arriving.append((move, room, is_there))
        for move in self.role.sends[number]:
            data = self.blocks.to_send(move.blocks)
            self._sending.append(data)  # keep it alive until it is sent
            self._works.append(dist.isend(data, group=group, group_dst=move.target))
            self.over.counted.messages += 1
            self.over.counted.bytes += data.numel() * data.element_size()

    def _place(self, move: Move) -> tuple[Tensor, bool]:
        """Return the memory for a message, and whether it is the final one. Blocks to be added use one buffer in all
        rounds: the system has to clear fresh memory first, which takes as long as the addition."""
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
        """Wait for the messages in flight, and store what was received."""
        for work in self._works:
            work.wait()
        for move, room, is_there in self._arriving:
            if not is_there:
                self.blocks.put(move.blocks, room, self.combine if move.adds else None)
        self._works, self._arriving, self._sending = [], [], []
