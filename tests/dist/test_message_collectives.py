"""Collectives by their lists: every algorithm equals torch's, and sends the bytes of its list."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.blueprint.collectives.algorithms import ALGORITHMS, KINDS
from shoal.blueprint.collectives.steps import cut, steps
from shoal.comm.message_collectives import MessageCollectives
from shoal.comm.world import World
from tests.cover import wide
from tests.dist.pool import on_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
SIZES = (1, 7, 260)


def drawn(size: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Small whole numbers: sums of them are exact in any order."""
    generator = torch.Generator().manual_seed(1000 * size + rank)
    return torch.randint(-8, 8, (size,), generator=generator).to(dtype)


# Every power of two up to 4, and beside it with one rank too many (3) and with two (6); 4, 6 and 8 have nodes.
@on_ranks(1, 2, 3, 4, 6, *map(wide, (5, 7, 8, 9)), timeout=110)
def test_every_algorithm_gives_what_torch_gives_and_sends_what_it_lists(world: World) -> None:
    for algorithm, kind, size in itertools.product(ALGORITHMS, KINDS, SIZES):
        for node in nodes_of(algorithm, world.size):
            dtype = DTYPES[(size + len(kind) + len(algorithm)) % len(DTYPES)]
            over = MessageCollectives(world.control_group, algorithm, segments=3, node=node)
            case = f"{kind} {algorithm} of {size} {dtype} in nodes of {node}"
            compare(over, kind, size, dtype, case)
            listed = steps(kind, algorithm, world.size, given(kind, size, world.size), segments=3, node=node)
            assert over.counted.messages == listed.messages(world.rank), case
            assert over.counted.bytes == listed.sent(world.rank) * dtype.itemsize, case


def nodes_of(algorithm: str, world: int) -> list[int | None]:
    return [n for n in range(1, world + 1) if world % n == 0] if algorithm == "hierarchical" else [None]


def given(kind: str, size: int, world: int) -> int:
    return size * world if kind == "all_gather" else size


def compare(over: MessageCollectives, kind: str, size: int, dtype: torch.dtype, case: str) -> None:
    every = [drawn(size, dtype, rank) for rank in range(over.size)]
    mine = every[over.rank].clone()
    total = torch.stack(every).sum(0).to(dtype)
    ours: Any
    if kind == "all_reduce":
        ours, theirs = over.all_reduce(mine), total
    elif kind == "reduce_scatter":
        ours, theirs = over.reduce_scatter(mine), total.split(cut(size, over.size))[over.rank]
    elif kind == "all_gather":
        ours, theirs = over.all_gather(mine), torch.cat(every)
    elif kind == "broadcast":
        ours, theirs = over.broadcast(mine), every[0]
    else:
        ours = over.all_to_all(mine)
        theirs = torch.cat([each.split(cut(size, over.size))[over.rank] for each in every])
    assert torch.equal(ours, theirs), case


@on_ranks(2, 3, 4)
def test_other_reductions_other_roots_and_lanes(world: World) -> None:
    every = [torch.randn(999, generator=torch.Generator().manual_seed(rank), dtype=torch.float64) for rank in range(9)]
    for algorithm in ALGORITHMS:
        over = MessageCollectives(
            world.control_group, algorithm, node=1 if algorithm == "hierarchical" else None, chunks=4
        )
        peers = torch.stack(every[: world.size])
        assert torch.equal(over.all_reduce(every[world.rank].clone(), "max"), peers.amax(0))
        torch.testing.assert_close(over.all_reduce(every[world.rank].clone(), "avg"), peers.mean(0))
        root = world.size - 1
        assert torch.equal(over.broadcast(every[world.rank].clone(), root), every[root])


@on_ranks(4)
def test_a_ring_sends_as_much_as_the_formula_says(world: World) -> None:
    over = MessageCollectives(world.control_group, "ring")
    x = torch.ones(4 * 1000, dtype=torch.float32)
    over.all_reduce(x)
    assert over.counted.bytes == 2 * (4 - 1) / 4 * x.numel() * 4
    theirs = torch.ones(4 * 1000)
    dist.all_reduce(theirs, group=world.control_group)
    assert torch.equal(x, theirs)


def test_nodes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="node must divide the 6 ranks of a hierarchical collective, got 4"):
        steps("all_reduce", "hierarchical", 6, 10, node=4)
