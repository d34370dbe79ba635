"""Under `zero`, a step in which ranks use different parameters is rejected, and one in which all leave out the same
ones is that of one process. Plain FSDP2 adds gradients of different parameters to each other there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.comm.world import World
from tests.dist.pool import on_ranks
from tests.rejects import rejects


class Branches(nn.Module):
    """Each sample goes through the branch that its first feature names; none goes through the last one."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.Linear(n, 8)) for n in widths)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = hidden = self.first(x).tanh()
        for number, branch in enumerate(self.branches):
            chosen = (x[:, 0] == number).nonzero()[:, 0]
            if len(chosen):
                y = y.index_add(0, chosen, branch(hidden[chosen]))
        return self.last(y)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (8, 8, 8)) -> None:
        super().__init__()
        self.block = Branches(widths)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]

    def describe(self) -> shoal.Description:
        return shoal.Description(blocks=("block",))


def batch(branches: list[int]) -> tuple[Tensor, Tensor]:
    x = torch.randn(len(branches), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[:, 0] = torch.tensor(branches)
    return x, torch.arange(len(branches)) % 3


def train(world: World, plan: str, steps: list[list[int]], widths: tuple[int, ...] = (8, 8, 8)) -> dict[str, Tensor]:
    run = shoal.Run(f"{plan} fp64", world=world, clip=1.0)
    model = Model(widths)
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))
    for branches in steps:
        x, y = batch(branches)
        share = len(x) // world.size
        own = slice(world.rank * share, (world.rank + 1) * share)
        run.step((x[own], y[own]))
    return run.weights()  # whole, on rank 0


def by_hand(steps: list[list[int]]) -> dict[str, Tensor]:
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for branches in steps:
        x, y = batch(branches)
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


PLANS = ["zero=1", "zero=2", "zero=3", "zero=1 mb=1", "zero=2 mb=1", "zero=3 mb=1"]


@pytest.mark.parametrize("plan", PLANS)
@on_ranks(2)
def test_ranks_that_use_different_parameters_are_rejected(world: World, plan: str) -> None:
    for widths in ((8, 8, 8), (8, 16, 8)):  # messages of one size, and of two
        missing = "block.branches.1.0.bias" if world.rank == 0 else "block.branches.0.0.bias"
        with rejects("T100", plan.split()[0], missing):
            train(world, plan, [[0, 1, 0, 1], [0, 0, 1, 1]], widths)


@pytest.mark.parametrize("plan", ["zero=2 mb=1", "zero=3 mb=1"])
@on_ranks(2)
def test_the_same_parameters_in_another_microbatch_are_rejected(world: World, plan: str) -> None:
    with rejects("T100"):
        train(world, plan, [[0, 1, 0, 1], [0, 1, 1, 0]])


@on_ranks(4)
def test_replicas_of_shards_have_to_use_the_same_ones_too(world: World) -> None:
    with rejects("T100"):
        train(world, "dp_replicate=2 dp_shard=2 zero=3", [[0, 1] * 4, [0, 1, 0, 1, 0, 0, 0, 0]])


@pytest.mark.parametrize("plan", PLANS)
@on_ranks(2)
def test_what_no_rank_uses_has_no_gradient(world: World, plan: str) -> None:
    """Weights without a gradient are not even decayed."""
    steps = [[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]]
    found, expected = train(world, plan, steps), by_hand(steps)
    for name, weight in expected.items() if world.is_main else ():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-14, msg=name)


@on_ranks(2)
def test_zeros_end_where_gradients_are_summed_in_several_steps(world: World) -> None:
    steps = [[0, 1, 0, 1], [0, 1, 0, 1], [1, 0, 1, 0]]
    found, expected = train(world, "zero=1 mb=1", steps), by_hand(steps)
    for name, weight in expected.items() if world.is_main else ():
        torch.testing.assert_close(found[name], weight, rtol=1e-12, atol=1e-14, msg=name)
