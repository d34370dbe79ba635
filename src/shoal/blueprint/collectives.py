"""Collectives as lists of messages: who sends which part of a tensor to whom, and when. Pure; `comm` carries them out.

A tensor is cut into blocks, and a message carries some of them. A list of messages one after the other is easy
to write down and to prove; which of them may travel at the same time then follows from what each one needs:

    ring, 3 ranks, all-reduce              round 1      round 2      round 3      round 4
    every rank has blocks a b c            0 ─c─▶ 1     0 ─b─▶ 1     0 ─a─▶ 1     0 ─c─▶ 1
    ─▶ adds up in the first half,          1 ─a─▶ 2     1 ─c─▶ 2     1 ─b─▶ 2     1 ─a─▶ 2
       replaces in the second              2 ─b─▶ 0     2 ─a─▶ 0     2 ─c─▶ 0     2 ─b─▶ 0

In a round every rank sends one message at most and receives one at most. Bytes, messages, the cost in latency and
bandwidth, and the picture, all come from the list.

    what             before                              after
    all_reduce       every rank: all blocks              every rank: their sums
    reduce_scatter   every rank: all blocks              rank r: the sums of part r
    all_gather       rank r: part r                      every rank: all parts
    broadcast        the root: all blocks                every rank: all blocks
    all_to_all       rank r: blocks (r, t) for all t     rank r: blocks (s, r) for all s
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, get_args

from shoal.errors import ShoalError, listed

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
Algorithm = Literal["naive", "ring", "tree", "double_tree", "halving", "hierarchical"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
Blocks = tuple[int, ...]
Parts = Sequence[Blocks]
"""For each member of a group, the blocks that are its own."""


@dataclass(frozen=True, slots=True)
class Move:
    """A message."""

    source: int
    target: int
    blocks: Blocks
    adds: bool
    """True: what arrives is added to what is there; else it takes its place."""


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
        """That a message carries."""
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
        """From whom to whom → elements."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for move in self.moves():
            found[move.source, move.target] += self.elements(move)
        return dict(found)

    def seconds(self, *, latency: float, bandwidth: float, bytes_per_element: int = 4) -> float:
        """The cost over links that are all alike: a round takes as long as its longest message."""
        return self.seconds_over(lambda source, target: (latency, bandwidth), bytes_per_element)

    def seconds_over(
        self, link: Callable[[int, int], tuple[float, float]], bytes_per_element: int = 4, shared: bool = False
    ) -> float:
        """The same over links that differ: `link(source, target)` is latency and bandwidth. `shared`: those messages of
        a round that go over the slowest kind of link share its bandwidth."""
        total = 0.0
        for moves in self.rounds:
            slowest = min((link(m.source, m.target)[1] for m in moves), default=0.0)
            over = sum(link(m.source, m.target)[1] == slowest for m in moves) if shared else 1
            costs = []
            for move in moves:
                latency, bandwidth = link(move.source, move.target)
                share = over if shared and bandwidth == slowest else 1
                costs.append(latency + self.elements(move) * bytes_per_element * share / bandwidth)
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
    """The messages of a collective over a tensor of `size` elements: of the whole one for all_reduce, broadcast,
    reduce_scatter (input) and all_gather (output); of what one rank gives for all_to_all.

    segments    into how many pieces trees and chains cut what they pass on, so that levels work at the same time
    node        ranks of a node, for the hierarchical one

    >>> steps("all_reduce", "ring", 4, 1000).sent(rank=2)
    1500
    """
    if algorithm == "hierarchical" and (not node or world % node):
        raise ShoalError(
            f"{world} ranks cannot be divided into nodes of {node or 'an unknown number of'} ranks",
            fix=f"node={listed(n for n in range(1, world + 1) if world % n == 0)}",
        )
    made = _MADE[kind]
    moves, num_blocks = made(algorithm, world, max(1, segments), node or 1)
    if root:
        moves = [Move((m.source + root) % world, (m.target + root) % world, m.blocks, m.adds) for m in moves]
    sizes = _sizes(kind, world, size, num_blocks)
    kept = (_without_empty(move, sizes) for move in moves)
    return Steps(kind, algorithm, world, sizes, in_rounds([move for move in kept if move.blocks]))


def cut(size: int, parts: int) -> list[int]:
    """Sizes of parts that are as alike as can be, the larger ones first.

    >>> cut(10, 4)
    [3, 3, 2, 2]
    """
    return [size // parts + (index < size % parts) for index in range(parts)]


def _sizes(kind: Kind, world: int, size: int, num_blocks: int) -> tuple[int, ...]:
    """Of the blocks. Where ranks own parts, a part is cut further if there are more blocks than ranks."""
    if kind == "all_to_all":
        return tuple(cut(size, world) * world)
    if kind in ("reduce_scatter", "all_gather"):
        return tuple(piece for part in cut(size, world) for piece in cut(part, num_blocks // world))
    return tuple(cut(size, num_blocks))


def _without_empty(move: Move, sizes: Sequence[int]) -> Move:
    return Move(move.source, move.target, tuple(block for block in move.blocks if sizes[block]), move.adds)


def in_rounds(moves: Sequence[Move]) -> tuple[tuple[Move, ...], ...]:
    """Messages that are right one after the other, as early as they may travel: after what they carry has arrived, not
    before what they replace has been sent on, and one out and one in for each rank at a time."""
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


# ---- what algorithms are made of -------------------------------------------------------------------------------------


def _ring_scatter(members: Sequence[int], parts: Parts) -> Iterator[Move]:
    """Sums go round; member i ends up with that of part i."""
    n = len(members)
    for k in range(n - 1):
        for i in range(n):
            yield Move(members[i], members[(i + 1) % n], parts[(i - k - 1) % n], adds=True)


def _ring_gather(members: Sequence[int], parts: Parts) -> Iterator[Move]:
    """Member i has part i; parts go round until all have them."""
    n = len(members)
    for k in range(n - 1):
        for i in range(n):
            yield Move(members[i], members[(i + 1) % n], parts[(i - k) % n], adds=False)


@dataclass(frozen=True)
class Tree:
    """A tree over ranks."""

    root: int
    parent: dict[int, int]

    @property
    def top_down(self) -> list[int]:
        """Every rank after its parent."""
        order = [self.root]
        for rank in order:
            order += sorted(child for child, parent in self.parent.items() if parent == rank)
        return order

    def below(self) -> dict[int, set[int]]:
        """Rank → itself and those below it."""
        found = {rank: {rank} for rank in self.top_down}
        for rank in reversed(self.top_down):
            if rank in self.parent:
                found[self.parent[rank]] |= found[rank]
        return found

    def reduce(self, blocks: Blocks) -> Iterator[Move]:
        """Sums come up to the root."""
        for rank in reversed(self.top_down[1:]):
            yield Move(rank, self.parent[rank], blocks, adds=True)

    def broadcast(self, blocks: Blocks) -> Iterator[Move]:
        """What the root has goes down to all."""
        for rank in self.top_down[1:]:
            yield Move(self.parent[rank], rank, blocks, adds=False)

    def scatter(self, parts: Parts) -> Iterator[Move]:
        """The root has all parts; each rank gets those of the ranks below it."""
        below = self.below()
        for rank in self.top_down[1:]:
            blocks = tuple(block for each in sorted(below[rank]) for block in parts[each])
            yield Move(self.parent[rank], rank, blocks, adds=False)

    def gather(self, parts: Parts) -> Iterator[Move]:
        """The other way round."""
        for move in reversed(list(self.scatter(parts))):
            yield Move(move.target, move.source, move.blocks, adds=False)


@lru_cache
def binary_tree(world: int) -> Tree:
    """Rank r below (r - 1) / 2: rank 0 is the root."""
    return Tree(0, {rank: (rank - 1) // 2 for rank in range(1, world)})


@lru_cache
def two_trees(world: int) -> tuple[Tree, Tree]:
    """Two trees in which almost nobody has children in both, so that each carries half and both directions are busy.

    The first is in order: odd ranks are inside, and even ones leaves. The second is the first one shifted by a rank, or
    mirrored if their number is even, where a shift would bring a leaf to the top.
    """
    first = _in_order(world)
    turned: Callable[[int], int] = (lambda r: (r + 1) % world) if world % 2 else (lambda r: world - 1 - r)
    second = Tree(turned(first.root), {turned(child): turned(parent) for child, parent in first.parent.items()})
    return first, second


def _in_order(world: int) -> Tree:
    parent: dict[int, int] = {}

    def built(low: int, high: int) -> int:
        """The top of the ranks from `low` to `high`: the one of them that is divisible by the largest power of two,
        counted from 1; so that leaves are even."""
        top = max(range(low, high), key=lambda rank: ((rank + 1) & -(rank + 1), -rank))
        if low < top:
            parent[built(low, top)] = top
        if top + 1 < high:
            parent[built(top + 1, high)] = top
        return top

    return Tree(built(0, world), parent)


@dataclass(frozen=True)
class _Folded:
    """As many ranks as a power of two allows; each other one has a partner among them that speaks for it."""

    active: list[int]
    partner: dict[int, int]
    """Who is spoken for → by whom."""

    @classmethod
    def of(cls, world: int) -> _Folded:
        size = 1 << (world.bit_length() - 1)
        extra = world - size
        pairs = {2 * i + 1: 2 * i for i in range(extra)}
        return cls([rank for rank in range(world) if rank not in pairs], pairs)

    def spoken_for(self, parts: Parts) -> list[Blocks]:
        """For each active rank, its own part and that of its partner."""
        others = {by: parts[rank] for rank, by in self.partner.items()}
        return [tuple(parts[rank]) + tuple(others.get(rank, ())) for rank in self.active]

    def halve(self, parts: Parts) -> Iterator[Move]:
        """Exchange halves of what is left with ever nearer ranks; active rank i ends up with the sum of part i."""
        yield from self._exchange(parts, down=True)

    def double(self, parts: Parts) -> Iterator[Move]:
        """The other way round, without sums."""
        yield from self._exchange(parts, down=False)

    def _exchange(self, parts: Parts, *, down: bool) -> Iterator[Move]:
        n = len(self.active)
        distances = [1 << bit for bit in range(n.bit_length() - 1)]
        for distance in reversed(distances) if down else distances:
            for i in range(n):
                peer = i ^ distance
                low = (peer if down else i) // distance * distance  # whose side of the pair is sent
                blocks = tuple(block for j in range(low, low + distance) for block in parts[j])
                yield Move(self.active[i], self.active[peer], blocks, adds=down)


def _flat(parts: Parts) -> Blocks:
    return tuple(block for part in parts for block in part)


def _singles(count: int) -> list[Blocks]:
    return [(block,) for block in range(count)]


def _nodes(world: int, node: int) -> list[list[int]]:
    return [list(range(first, first + node)) for first in range(0, world, node)]


# ---- the collectives -------------------------------------------------------------------------------------------------

_Made = tuple[list[Move], int]
"""Moves, one after the other, and how many blocks there are."""


def _all_reduce(algorithm: Algorithm, world: int, segments: int, node: int) -> _Made:
    ranks = list(range(world))
    moves: list[Move] = []
    if algorithm == "ring":
        parts = _singles(world)
        return [*_ring_scatter(ranks, parts), *_ring_gather(ranks, parts)], world
    if algorithm == "halving":
        folded = _Folded.of(world)
        parts = _singles(len(folded.active))
        whole = _flat(parts)
        moves += [Move(rank, by, whole, adds=True) for rank, by in folded.partner.items()]
        moves += [*folded.halve(parts), *folded.double(parts)]
        moves += [Move(by, rank, whole, adds=False) for rank, by in folded.partner.items()]
        return moves, len(parts)
    if algorithm == "hierarchical":
        nodes = _nodes(world, node)
        blocks = [tuple(range(local * len(nodes), (local + 1) * len(nodes))) for local in range(node)]
        for members in nodes:
            moves += _ring_scatter(members, blocks)
        for local in range(node):
            across, own = [members[local] for members in nodes], [(block,) for block in blocks[local]]
            moves += [*_ring_scatter(across, own), *_ring_gather(across, own)]
        for members in nodes:
            moves += _ring_gather(members, blocks)
        return moves, world
    if algorithm == "naive":
        moves += [Move(rank, 0, (0,), adds=True) for rank in ranks[1:]]
        moves += [Move(0, rank, (0,), adds=False) for rank in ranks[1:]]
        return moves, 1
    trees = two_trees(world) if algorithm == "double_tree" else (binary_tree(world),)
    count = segments * len(trees)
    for block in range(count):
        tree = trees[block % len(trees)]
        moves += [*tree.reduce((block,)), *tree.broadcast((block,))]
    return moves, count


def _reduce_scatter(algorithm: Algorithm, world: int, segments: int, node: int) -> _Made:
    ranks = list(range(world))
    moves: list[Move] = []
    parts = _singles(world)
    if algorithm == "ring":
        moves += _ring_scatter(ranks, parts)
    elif algorithm == "halving":
        folded = _Folded.of(world)
        moves += [Move(rank, by, _flat(parts), adds=True) for rank, by in folded.partner.items()]
        moves += folded.halve(folded.spoken_for(parts))
        moves += [Move(by, rank, parts[rank], adds=False) for rank, by in folded.partner.items()]
    elif algorithm == "hierarchical":
        nodes = _nodes(world, node)
        lanes = [tuple(range(local, world, node)) for local in range(node)]
        for members in nodes:
            moves += _ring_scatter(members, lanes)
        for lane in lanes:
            moves += _ring_scatter(lane, [(rank,) for rank in lane])
    elif algorithm == "naive":
        moves += [Move(rank, (rank + k) % world, parts[(rank + k) % world], True) for k in ranks[1:] for rank in ranks]
    else:
        trees, parts_of = _trees_of_parts(algorithm, world)
        for tree, own in zip(trees, parts_of, strict=True):
            moves += [*tree.reduce(_flat(own)), *tree.scatter(own)]
        return moves, world * len(trees)
    return moves, world


def _all_gather(algorithm: Algorithm, world: int, segments: int, node: int) -> _Made:
    ranks = list(range(world))
    moves: list[Move] = []
    parts = _singles(world)
    if algorithm == "ring":
        moves += _ring_gather(ranks, parts)
    elif algorithm == "halving":
        folded = _Folded.of(world)
        moves += [Move(rank, by, parts[rank], adds=False) for rank, by in folded.partner.items()]
        moves += folded.double(folded.spoken_for(parts))
        for rank, by in folded.partner.items():
            moves.append(Move(by, rank, tuple(block for block in range(world) if block != rank), adds=False))
    elif algorithm == "hierarchical":
        lanes = [tuple(range(local, world, node)) for local in range(node)]
        for lane in lanes:
            moves += _ring_gather(lane, [(rank,) for rank in lane])
        for members in _nodes(world, node):
            moves += _ring_gather(members, lanes)
    elif algorithm == "naive":
        moves += [Move(rank, (rank + k) % world, parts[rank], False) for k in ranks[1:] for rank in ranks]
    else:
        trees, parts_of = _trees_of_parts(algorithm, world)
        for tree, own in zip(trees, parts_of, strict=True):
            moves += [*tree.gather(own), *tree.broadcast(_flat(own))]
        return moves, world * len(trees)
    return moves, world


def _trees_of_parts(algorithm: Algorithm, world: int) -> tuple[tuple[Tree, ...], list[list[Blocks]]]:
    """The trees, and for each of them the blocks of every rank's part that it carries."""
    trees = two_trees(world) if algorithm == "double_tree" else (binary_tree(world),)
    count = len(trees)
    return trees, [[(rank * count + which,) for rank in range(world)] for which in range(count)]


def _broadcast(algorithm: Algorithm, world: int, segments: int, node: int) -> _Made:
    ranks = list(range(world))
    moves: list[Move] = []
    if algorithm == "halving":
        folded = _Folded.of(world)
        parts, n = _singles(len(folded.active)), len(folded.active)
        distance = n // 2
        while distance:  # every holder gives the upper half of what it has away
            for i in range(0, n, 2 * distance):
                upper = _flat(parts[i + distance : i + 2 * distance])
                moves.append(Move(folded.active[i], folded.active[i + distance], upper, adds=False))
            distance //= 2
        moves += folded.double(parts)
        moves += [Move(by, rank, _flat(parts), adds=False) for rank, by in folded.partner.items()]
        return moves, n
    if algorithm == "naive":
        return [Move(0, rank, (0,), adds=False) for rank in ranks[1:]], 1
    if algorithm == "ring":
        chain = [Move(rank, rank + 1, (block,), adds=False) for block in range(segments) for rank in ranks[:-1]]
        return chain, segments
    if algorithm == "hierarchical":
        for block in range(segments):
            moves += [_lifted(m, node) for m in binary_tree(world // node).broadcast((block,))]
            for members in _nodes(world, node):
                first = members[0]
                inside = binary_tree(node).broadcast((block,))
                moves += [Move(m.source + first, m.target + first, m.blocks, m.adds) for m in inside]
        return moves, segments
    trees = two_trees(world) if algorithm == "double_tree" else (binary_tree(world),)
    count = segments * len(trees)
    for block in range(count):
        tree = trees[block % len(trees)]
        moves += [Move(0, tree.root, (block,), adds=False)] * (tree.root != 0)
        moves += [m for m in tree.broadcast((block,)) if m.target != 0]  # which has it
    return moves, count


def _lifted(move: Move, node: int) -> Move:
    """From nodes to their first ranks."""
    return Move(move.source * node, move.target * node, move.blocks, move.adds)


def _all_to_all(algorithm: Algorithm, world: int, segments: int, node: int) -> _Made:
    ranks = list(range(world))
    moves: list[Move] = []

    def of(source: int, target: int) -> int:
        return source * world + target

    if algorithm == "naive":
        for k in ranks[1:]:
            moves += [Move(r, (r + k) % world, (of(r, (r + k) % world),), adds=False) for r in ranks]
    elif algorithm == "ring":
        for k in ranks[
            1:
        ]:  # at the k-th hop, a rank passes on what began k - 1 ranks before it and has k or more to go
            for r in ranks:
                s = (r - k + 1) % world
                on_the_way = tuple(of(s, (s + far) % world) for far in range(k, world))
                moves.append(Move(r, (r + 1) % world, on_the_way, adds=False))
    elif algorithm == "halving":
        for bit in range((world - 1).bit_length()):  # blocks jump by the bits of the way that they have to go
            jump, done = 1 << bit, (1 << bit) - 1
            for r in ranks:
                blocks = tuple(
                    of((r - (far & done)) % world, (r - (far & done) + far) % world)
                    for far in range(1, world)
                    if far & jump
                )
                moves.append(Move(r, (r + jump) % world, blocks, adds=False))
    elif algorithm == "hierarchical":
        nodes = _nodes(world, node)
        for members in nodes:
            for k in range(1, node):
                for local, r in enumerate(members):
                    peer = (local + k) % node
                    moves.append(Move(r, members[peer], tuple(of(r, t) for t in range(peer, world, node)), adds=False))
        for k in range(1, len(nodes)):
            for number, members in enumerate(nodes):
                other = nodes[(number + k) % len(nodes)]
                for local, r in enumerate(members):
                    moves.append(Move(r, other[local], tuple(of(s, other[local]) for s in members), adds=False))
    else:
        for tree, chosen in _halves(algorithm, world):
            below = tree.below()
            for r in reversed(tree.top_down[1:]):
                up = tuple(of(s, t) for s in sorted(below[r]) for t in ranks if t not in below[r] and chosen(s, t))
                moves.append(Move(r, tree.parent[r], up, adds=False))
            for r in tree.top_down[1:]:
                down = tuple(of(s, t) for t in sorted(below[r]) for s in ranks if s not in below[r] and chosen(s, t))
                moves.append(Move(tree.parent[r], r, down, adds=False))
    return moves, world * world


def _halves(algorithm: Algorithm, world: int) -> list[tuple[Tree, Callable[[int, int], bool]]]:
    """Trees, and which pairs of ranks each of them serves."""
    if algorithm == "tree":
        return [(binary_tree(world), lambda s, t: True)]
    first, second = two_trees(world)
    return [(first, lambda s, t: (s + t) % 2 == 0), (second, lambda s, t: (s + t) % 2 == 1)]


_MADE: dict[Kind, Callable[[Algorithm, int, int, int], _Made]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
}


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where blocks begin, and where the last one ends."""
    return [0, *accumulate(sizes)]
