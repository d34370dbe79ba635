"""Collectives on paper: whoever plays the messages of a list has, in the end, what the collective promises."""

from __future__ import annotations

import pytest

from shoal.blueprint.collectives.algorithms import ALGORITHMS, KINDS, Algorithm, Kind, two_trees
from shoal.blueprint.collectives.steps import Steps, steps

Held = list[dict[int, frozenset[int]]]
"""For each rank: block → the ranks whose values are in it."""


def begun(listed: Steps, root: int) -> Held:
    world, count = listed.world, len(listed.sizes)
    if listed.kind in ("all_reduce", "reduce_scatter"):
        return [{block: frozenset([rank]) for block in range(count)} for rank in range(world)]
    if listed.kind == "broadcast":
        return [{block: frozenset([root]) for block in range(count)} if rank == root else {} for rank in range(world)]
    per = count // world
    return [{block: frozenset([rank]) for block in range(rank * per, (rank + 1) * per)} for rank in range(world)]


def played(listed: Steps, root: int = 0) -> Held:
    """Round by round; in a round all messages carry what was there before it."""
    held = begun(listed, root)
    for moves in listed.rounds:
        assert len({move.source for move in moves}) == len({move.target for move in moves}) == len(moves)
        carried = [{block: held[move.source][block] for block in move.blocks} for move in moves]
        for move, payload in zip(moves, carried, strict=True):
            for block, values in payload.items():
                own = held[move.target].get(block, frozenset()) if move.adds else frozenset()
                assert not own & values, "a value is added twice"
                held[move.target][block] = own | values
    return held


def promised(listed: Steps, rank: int, block: int, root: int) -> frozenset[int] | None:
    """What a rank has to have of a block; None: nothing."""
    world, per = listed.world, len(listed.sizes) // listed.world
    everyone = frozenset(range(world))
    if listed.kind == "all_reduce":
        return everyone
    if listed.kind == "reduce_scatter":
        return everyone if block // per == rank else None
    if listed.kind == "broadcast":
        return frozenset([root])
    if listed.kind == "all_gather":
        return frozenset([block // per])
    return frozenset([block // world]) if block % world == rank else None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_list_keeps_its_promise(kind: Kind, algorithm: Algorithm) -> None:
    for world in range(1, 18):
        nodes = [n for n in range(1, world + 1) if world % n == 0] if algorithm == "hierarchical" else [None]
        for size in (0, 1, 7, 100):
            for segments in (1, 3):
                for node in nodes:
                    root = world // 2 if kind == "broadcast" else 0
                    listed = steps(kind, algorithm, world, size, segments=segments, node=node, root=root)
                    held = played(listed, root)
                    for rank in range(world):
                        for block, elements in enumerate(listed.sizes):
                            wanted = promised(listed, rank, block, root)
                            if elements and wanted is not None:
                                assert held[rank][block] == wanted, (world, size, segments, node)


@pytest.mark.parametrize("world", [2, 3, 4, 8, 9])
def test_bytes_and_rounds_are_those_of_the_formulas(world: int) -> None:
    size = 2520 * world
    ring = steps("all_reduce", "ring", world, size)
    assert {ring.sent(rank) for rank in range(world)} == {2 * (world - 1) * size // world}
    assert len(ring.rounds) == 2 * (world - 1)
    assert ring.seconds(latency=1.0, bandwidth=4.0) == pytest.approx(
        2 * (world - 1) * 1.0 + 2 * (world - 1) / world * size
    )
    gather = steps("all_gather", "ring", world, size)
    assert {gather.sent(rank) for rank in range(world)} == {(world - 1) * size // world}
    if world & (world - 1) == 0:
        halving = steps("all_reduce", "halving", world, size)
        assert len(halving.rounds) == 2 * (world.bit_length() - 1)
        assert halving.sent(0) == ring.sent(0)


def test_across_nodes_a_hierarchy_sends_a_share() -> None:
    """Two nodes of four: each rank sends a quarter of the tensor, twice a half of it, to the other node."""
    listed = steps("all_reduce", "hierarchical", 8, 8000, node=4)
    across = sum(elements for (source, target), elements in listed.links().items() if source // 4 != target // 4)
    assert across == 8 * 2 * 8000 // 4 // 2
    flat = steps("all_reduce", "ring", 8, 8000).links()
    assert sum(elements for (s, t), elements in flat.items() if s // 4 != t // 4) == 2 * 14 * 1000


def test_segments_let_the_levels_of_a_tree_work_at_the_same_time() -> None:
    whole = steps("broadcast", "tree", 8, 4096).seconds(latency=0.0, bandwidth=1.0)
    cut = steps("broadcast", "tree", 8, 4096, segments=16).seconds(latency=0.0, bandwidth=1.0)
    assert cut < 0.6 * whole


@pytest.mark.parametrize("world", range(2, 40))
def test_few_ranks_have_children_in_both_trees(world: int) -> None:
    first, second = two_trees(world)
    both = set(first.parent.values()) & set(second.parent.values())
    assert len(both) <= 1
    assert len(first.top_down) == len(second.top_down) == world


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_critical_path_is_what_seconds_are_made_of(kind: Kind, algorithm: Algorithm) -> None:
    listed = steps(kind, algorithm, 6, 999, node=2)
    rounds, elements = listed.critical()
    assert listed.seconds(latency=3.0, bandwidth=2.0) == pytest.approx(rounds * 3.0 + elements * 4 / 2.0)


def test_messages_over_one_wire_share_it() -> None:
    """2 x 2 ranks. A flat ring sends a quarter over each cable in 6 rounds; hierarchical, a quarter for both of a pair
    in 2 rounds: 1.5 against 1."""

    def link(source: int, target: int) -> tuple[float, float]:
        return (0.0, 1e12) if source // 2 == target // 2 else (0.0, 4.0)

    def cable(source: int, target: int) -> tuple[object, ...]:
        return ("inside", source, target) if source // 2 == target // 2 else ("cable", source // 2)

    seconds = {
        name: steps("all_reduce", name, 4, 1000, node=2).seconds_over(link, wire=cable)
        for name in ("ring", "hierarchical")
    }
    assert seconds == pytest.approx({"ring": 1500.0, "hierarchical": 1000.0}, rel=1e-6)
