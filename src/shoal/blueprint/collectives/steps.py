"""Collectives as lists of messages: source, target and blocks of each, in rounds. Pure; `comm` executes them.

A tensor is cut into blocks, and a message carries some of them. A sequential list of messages is easy to write and to
prove. The data dependencies then decide which messages may travel at the same time:

    ring, 3 ranks, all-reduce              round 1      round 2      round 3      round 4
    every rank has blocks a b c            0 ─c─▶ 1     0 ─b─▶ 1     0 ─a─▶ 1     0 ─c─▶ 1
    ─▶ adds in the first half,             1 ─a─▶ 2     1 ─c─▶ 2     1 ─b─▶ 2     1 ─a─▶ 2
       replaces in the second              2 ─b─▶ 0     2 ─a─▶ 0     2 ─c─▶ 0     2 ─b─▶ 0

In a round every rank sends one message at most and receives one at most. Bytes, messages, the cost in latency and
bandwidth, and the picture, all come from the list.

    collective       before                              after
    all_reduce       every rank: all blocks              every rank: their sums
    reduce_scatter   every rank: all blocks              rank r: the sums of part r
    all_gather       rank r: part r                      every rank: all parts
    broadcast        the root: all blocks                every rank: all blocks
    all_to_all       rank r: blocks (r, t) for all t     rank r: blocks (s, r) for all s
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shoal.blueprint.collectives.algorithms import MADE, Algorithm, Kind, Move
from shoal.errors import ShoalError, listed


@dataclass(frozen=True, slots=True)
class Steps:
    """A collective, message by message."""

    kind: Kind
    algorithm: Algorithm
    world: int
    sizes: tuple[int, ...]
    """Elements of each block."""
    rounds: tuple[tuple[Move, ...], ...]

    def elements(self, move: Move) -> int:
        """Elements that a message carries."""
        return sum(self.sizes[block] for block in move.blocks)

    def moves(self) -> Iterator[Move]:
        """All messages, those of a round together."""
        return (move for moves in self.rounds for move in moves)

    def sent(self, rank: int) -> int:
        """Elements that a rank sends."""
        return sum(self.elements(move) for move in self.moves() if move.source == rank)

    def messages(self, rank: int) -> int:
        """Messages that a rank sends."""
        return sum(move.source == rank for move in self.moves())

    def links(self) -> dict[tuple[int, int], int]:
        """(source, target) → elements."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for move in self.moves():
            found[move.source, move.target] += self.elements(move)
        return dict(found)

    def critical(self) -> tuple[int, int]:
        """The number of rounds, and the sum of the longest messages of all rounds in elements.

        `seconds` multiplies them by the latency and by the time of an element.
        """
        longest = (max((self.elements(move) for move in moves), default=0) for moves in self.rounds)
        return len(self.rounds), sum(longest)

    def seconds(self, *, latency: float, bandwidth: float, bytes_per_element: int = 4) -> float:
        """The cost over equal links: a round takes as long as its longest message."""
        return self.seconds_over(lambda source, target: (latency, bandwidth), bytes_per_element)

    def seconds_over(
        self,
        link: Callable[[int, int], tuple[float, float]],
        bytes_per_element: int = 4,
        wire: Callable[[int, int], Hashable] | None = None,
    ) -> float:
        """The cost over different links: `link(source, target)` is latency and bandwidth.

        `wire(source, target)` identifies the physical link of a message. Messages of a round on the same wire share its
        bandwidth. None: each pair has its own.
        """
        named = wire or (lambda source, target: (source, target))
        total = 0.0
        for moves in self.rounds:
            load: dict[Hashable, int] = defaultdict(int)
            for move in moves:
                load[named(move.source, move.target)] += self.elements(move)
            costs = []
            for move in moves:
                latency, bandwidth = link(move.source, move.target)
                costs.append(latency + load[named(move.source, move.target)] * bytes_per_element / bandwidth)
            total += max(costs, default=0.0)
        return total


def steps(
    kind: Kind,
    algorithm: Algorithm,
    world: int,
    size: int,
    *,
    root: int = 0,
    segments: int = 1,
    node: int | None = None,
) -> Steps:
    """The messages of a collective over a tensor of `size` elements.

    `size` is the whole tensor for all_reduce, broadcast, reduce_scatter (input) and all_gather (output), and the input
    of one rank for all_to_all.

    segments    pieces that trees and chains cut their data into, so that levels work at the same time
    node        ranks of a node, for the hierarchical algorithm

    >>> steps("all_reduce", "ring", 4, 1000).sent(rank=2)
    1500
    """
    if algorithm == "hierarchical" and (not node or world % node):
        raise ShoalError(
            f"node must divide the {world} ranks of a hierarchical collective, got {node}",
            fix=f"node={listed(n for n in range(1, world + 1) if world % n == 0)}",
            code="P057",
        )
    moves, num_blocks = MADE[kind](algorithm, world, max(1, segments), node or 1)
    if root:
        moves = [Move((m.source + root) % world, (m.target + root) % world, m.blocks, m.adds) for m in moves]
    sizes = _sizes(kind, world, size, num_blocks)
    filled = (_without_empty(move, sizes) for move in moves)
    return Steps(kind, algorithm, world, sizes, in_rounds([move for move in filled if move.blocks]))


def cut(size: int, parts: int) -> list[int]:
    """Sizes of parts that differ by one at most, the larger ones first.

    >>> cut(10, 4)
    [3, 3, 2, 2]
    """
    return [size // parts + (index < size % parts) for index in range(parts)]


def _sizes(kind: Kind, world: int, size: int, num_blocks: int) -> tuple[int, ...]:
    """Sizes of the blocks. Where ranks own parts, a part is cut further if there are more blocks than ranks."""
    if kind == "all_to_all":
        return tuple(cut(size, world) * world)
    if kind in ("reduce_scatter", "all_gather"):
        return tuple(piece for part in cut(size, world) for piece in cut(part, num_blocks // world))
    return tuple(cut(size, num_blocks))


def _without_empty(move: Move, sizes: Sequence[int]) -> Move:
    return Move(move.source, move.target, tuple(block for block in move.blocks if sizes[block]), move.adds)


def in_rounds(moves: Sequence[Move]) -> tuple[tuple[Move, ...], ...]:
    """Pack a sequential list of messages into the earliest possible rounds.

    A message travels after its blocks have arrived, and not before the blocks that it replaces have been sent. A rank
    sends one message and receives one at a time.
    """
    written: dict[tuple[int, int], int] = defaultdict(lambda: -1)
    read: dict[tuple[int, int], int] = defaultdict(lambda: -1)
    sending: dict[int, set[int]] = defaultdict(set)
    receiving: dict[int, set[int]] = defaultdict(set)
    rounds: dict[int, list[Move]] = defaultdict(list)
    for move in moves:
        here = [(move.source, block) for block in move.blocks]
        there = [(move.target, block) for block in move.blocks]
        number = 1 + max(
            max(written[place] for place in here), max(max(written[place], read[place]) for place in there)
        )
        while number in sending[move.source] or number in receiving[move.target]:
            number += 1
        sending[move.source].add(number)
        receiving[move.target].add(number)
        for place in here:
            read[place] = max(read[place], number)
        for place in there:
            written[place] = number
        rounds[number].append(move)
    return tuple(tuple(rounds[number]) for number in sorted(rounds))


def offsets(sizes: Sequence[int]) -> list[int]:
    """The offset of each block, and the end of the last one."""
    return [0, *accumulate(sizes)]
