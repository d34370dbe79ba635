"""The messages of collective algorithms, as a sequential list, which is easy to prove.

`shoal.blueprint.collectives.steps` packs them into concurrent rounds and computes their cost. An algorithm combines a
few pieces: a ring, a tree, two trees, exchanges of halves. A function for each collective returns the messages of one
algorithm, and the number of blocks that they cut a tensor into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
Algorithm = Literal["naive", "ring", "tree", "double_tree", "halving", "hierarchical"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
Blocks = tuple[int, ...]
Parts = Sequence[Blocks]
"""For each member of a group, the blocks that it owns."""


@dataclass(frozen=True, slots=True)
class Move:
    """A message."""

    source: int
    target: int
    blocks: Blocks
    adds: bool
    """True: the target adds the blocks to its own; else it replaces its own."""


# ---- building blocks -------------------------------------------------------------------------------------------------


def _ring_scatter(members: Sequence[int], parts: Parts) -> Iterator[Move]:
    """Partial sums travel around the ring; member i ends with the sum of part i."""
    n = len(members)
    for k in range(n - 1):
        for i in range(n):
            yield Move(members[i], members[(i + 1) % n], parts[(i - k - 1) % n], adds=True)


def _ring_gather(members: Sequence[int], parts: Parts) -> Iterator[Move]:
    """Member i has part i; parts travel around the ring until all members have them."""
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
        """Rank → itself and its descendants."""
        found = {rank: {rank} for rank in self.top_down}
        for rank in reversed(self.top_down):
            if rank in self.parent:
                found[self.parent[rank]] |= found[rank]
        return found

    def reduce(self, blocks: Blocks) -> Iterator[Move]:
        """Send partial sums up to the root."""
        for rank in reversed(self.top_down[1:]):
            yield Move(rank, self.parent[rank], blocks, adds=True)

    def broadcast(self, blocks: Blocks) -> Iterator[Move]:
        """Send the root's blocks down to all ranks."""
        for rank in self.top_down[1:]:
            yield Move(self.parent[rank], rank, blocks, adds=False)

    def scatter(self, parts: Parts) -> Iterator[Move]:
        """The root has all parts; each rank gets its own and those of its descendants."""
        below = self.below()
        for rank in self.top_down[1:]:
            blocks = tuple(block for each in sorted(below[rank]) for block in parts[each])
            yield Move(self.parent[rank], rank, blocks, adds=False)


@lru_cache
def binary_tree(world: int) -> Tree:
    """A tree in which the parent of rank r is (r - 1) / 2 and rank 0 is the root."""
    return Tree(0, {rank: (rank - 1) // 2 for rank in range(1, world)})


@lru_cache
def two_trees(world: int) -> tuple[Tree, Tree]:
    """Two trees in which almost no rank has children in both. Each carries half, so both directions are busy.

    In the first, odd ranks are inner nodes and even ones leaves. The second is the first one shifted by a rank, or
    mirrored if the number of ranks is even, where a shift would make a leaf the root.
    """
    first = _in_order(world)
    turned: Callable[[int], int] = (lambda r: (r + 1) % world) if world % 2 else (lambda r: world - 1 - r)
    second = Tree(turned(first.root), {turned(child): turned(parent) for child, parent in first.parent.items()})
    return first, second


def _in_order(world: int) -> Tree:
    parent: dict[int, int] = {}

    def built(low: int, high: int) -> int:
        """The root of ranks `low` to `high`: counted from 1, the one that the largest power of two divides.

        So leaves are even.
        """
        top = max(range(low, high), key=lambda rank: ((rank + 1) & -(rank + 1), -rank))
        if low < top:
            parent[built(low, top)] = top
        if top + 1 < high:
            parent[built(top + 1, high)] = top
        return top

    return Tree(built(0, world), parent)


@dataclass(frozen=True)
class _Folded:
    """The largest power of two of ranks is active; each other rank has an active partner that sends for it."""

    active: list[int]
    partner: dict[int, int]
    """Inactive rank → its active partner."""

    @classmethod
    def of(cls, world: int) -> _Folded:
        size = 1 << (world.bit_length() - 1)
        extra = world - size
        pairs = {2 * i + 1: 2 * i for i in range(extra)}
        return cls([rank for rank in range(world) if rank not in pairs], pairs)

    def with_partners(self, parts: Parts) -> list[Blocks]:
        """For each active rank, its own part and that of its partner."""
        others = {by: parts[rank] for rank, by in self.partner.items()}
        return [tuple(parts[rank]) + tuple(others.get(rank, ())) for rank in self.active]

    def halve(self, parts: Parts) -> Iterator[Move]:
        """Exchange halves with ever nearer ranks; active rank i ends with the sum of part i."""
        yield from self._exchange(parts, down=True)

    def double(self, parts: Parts) -> Iterator[Move]:
        """The reverse of `halve`, without sums."""
        yield from self._exchange(parts, down=False)

    def _exchange(self, parts: Parts, *, down: bool) -> Iterator[Move]:
        n = len(self.active)
        distances = [1 << bit for bit in range(n.bit_length() - 1)]
        for distance in reversed(distances) if down else distances:
            for i in range(n):
                peer = i ^ distance
                low = (peer if down else i) // distance * distance  # the side of the pair that is sent
                blocks = tuple(block for j in range(low, low + distance) for block in parts[j])
                yield Move(self.active[i], self.active[peer], blocks, adds=down)


def _flat(parts: Parts) -> Blocks:
    return tuple(block for part in parts for block in part)


def _singles(count: int) -> list[Blocks]:
    return [(block,) for block in range(count)]


def _nodes(world: int, node: int) -> list[list[int]]:
    return [list(range(first, first + node)) for first in range(0, world, node)]


# ---- the collectives -------------------------------------------------------------------------------------------------

Made = tuple[list[Move], int]
"""Moves in sequence, and the number of blocks."""


def _all_reduce(algorithm: Algorithm, world: int, segments: int, node: int) -> Made:
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


def _reduce_scatter(algorithm: Algorithm, world: int, segments: int, node: int) -> Made:
    ranks = list(range(world))
    moves: list[Move] = []
    parts = _singles(world)
    if algorithm == "ring":
        moves += _ring_scatter(ranks, parts)
    elif algorithm == "halving":
        folded = _Folded.of(world)
        moves += [Move(rank, by, _flat(parts), adds=True) for rank, by in folded.partner.items()]
        moves += folded.halve(folded.with_partners(parts))
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


def _all_gather(algorithm: Algorithm, world: int, segments: int, node: int) -> Made:
    """A reduce-scatter in reverse. No rank receives its own part, which it has from the beginning."""
    moves, num_blocks = _reduce_scatter(algorithm, world, segments, node)
    per = num_blocks // world
    back = [
        Move(move.target, move.source, tuple(block for block in move.blocks if block // per != move.source), adds=False)
        for move in reversed(moves)
    ]
    return [move for move in back if move.blocks], num_blocks


def _trees_of_parts(algorithm: Algorithm, world: int) -> tuple[tuple[Tree, ...], list[list[Blocks]]]:
    """The trees, and for each of them the blocks that it carries of every rank's part."""
    trees = two_trees(world) if algorithm == "double_tree" else (binary_tree(world),)
    count = len(trees)
    return trees, [[(rank * count + which,) for rank in range(world)] for which in range(count)]


def _broadcast(algorithm: Algorithm, world: int, segments: int, node: int) -> Made:
    ranks = list(range(world))
    moves: list[Move] = []
    if algorithm == "halving":
        folded = _Folded.of(world)
        parts, n = _singles(len(folded.active)), len(folded.active)
        distance = n // 2
        while distance:  # every rank with blocks sends the upper half of them
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
        moves += [m for m in tree.broadcast((block,)) if m.target != 0]  # rank 0 has the block
    return moves, count


def _lifted(move: Move, node: int) -> Move:
    """Map a message between nodes to one between their first ranks."""
    return Move(move.source * node, move.target * node, move.blocks, move.adds)


def _all_to_all(algorithm: Algorithm, world: int, segments: int, node: int) -> Made:
    ranks = list(range(world))
    moves: list[Move] = []

    def of(source: int, target: int) -> int:
        return source * world + target

    if algorithm == "naive":
        for k in ranks[1:]:
            moves += [Move(r, (r + k) % world, (of(r, (r + k) % world),), adds=False) for r in ranks]
    elif algorithm == "ring":
        for k in ranks[1:]:
            # At the k-th hop, a rank forwards blocks that started k - 1 ranks before it and have k or more hops to go.
            for r in ranks:
                s = (r - k + 1) % world
                on_the_way = tuple(of(s, (s + far) % world) for far in range(k, world))
                moves.append(Move(r, (r + 1) % world, on_the_way, adds=False))
    elif algorithm == "halving":
        for bit in range((world - 1).bit_length()):  # blocks jump by the bits of their distance
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
    """Trees, and the pairs of ranks that each of them serves."""
    if algorithm == "tree":
        return [(binary_tree(world), lambda s, t: True)]
    first, second = two_trees(world)
    return [(first, lambda s, t: (s + t) % 2 == 0), (second, lambda s, t: (s + t) % 2 == 1)]


MADE: dict[Kind, Callable[[Algorithm, int, int, int], Made]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
}
