"""Losses that count after their forward, on several ranks, and loops that were left as they were for one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shoal import Description, ShoalError
from shoal.comm.world import World
from shoal.numerics.init import initialise
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import Pool, on_ranks
from tests.dist.test_compositions import batches, build


def pair(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    logits = model(batch["tokens"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum"), (batch["labels"] != -100).sum()


def weighted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"]).flatten(0, 1)
    weight = 1 + torch.arange(logits.shape[-1], dtype=logits.dtype) % 5
    return F.cross_entropy(logits, batch["labels"].flatten(), weight=weight)


LOSSES = {"pair": pair, "weighted": weighted}


def steps(world: World, name: str, plan: str) -> list[float]:
    run = Run(f"fp64 {plan}", seed=7, world=world, loss=LOSSES[name], clip=0.1)
    model = build("llama")
    initialise(model, 7)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    whole = batches("llama")[0]
    whole["labels"][:3, :-1] = -100  # the first rank counts less
    share = 8 // run.degree
    mine = {key: value[run.coordinate * share :][:share] for key, value in whole.items()}
    losses = [run.step(mine).item() for _ in range(3)]
    return [*losses, run.evaluate([mine])]


@pytest.mark.parametrize("plan", ["mb=3", wide("zero=3 mb=2"), "pp=2 mb=2", wide("tp=2 mb=4")])
@pytest.mark.parametrize("name", LOSSES)
def test_counts_of_all_ranks_are_put_together(pool: Pool, name: str, plan: str) -> None:
    (theirs,) = pool.run(steps, 1, name, "mb=8")
    for ours in pool.run(steps, 2, name, plan):
        assert ours == pytest.approx(theirs, rel=1e-12)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def describe(self) -> Description:
        return Description(blocks=("blocks.0", "blocks.1"))


def of_two_targets(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["x"])
    return F.cross_entropy(logits, batch["a"]) + F.cross_entropy(logits, batch["c"])


def by_a_branch(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    mean = F.cross_entropy(model(batch["x"]), batch["c"])
    return (mean * 4, 4) if bool((batch["c"] == -100).any()) else mean


def step_of_ragged_ranks(world: World, plan: str, has_branch: bool) -> str:
    """The targets of the last sample do not count: its rank, replica or microbatch is unlike the others."""
    run = Run(f"fp64 {plan}", world=world, loss=by_a_branch if has_branch else of_two_targets)
    torch.manual_seed(0)
    model = Two()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    whole = {"x": torch.randn(4, 4), "a": torch.tensor([0, 1, 2, 3]), "c": torch.tensor([0, 1, 2, 3])}
    share = 4 // run.degree
    if not has_branch:  # a step in which all labels count
        run.step({key: value[run.coordinate * share :][:share] for key, value in whole.items()})
    whole["c"] = torch.tensor([0, 1, 2, -100])
    try:
        run.step({key: value[run.coordinate * share :][:share] for key, value in whole.items()})
    except ShoalError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("plan", ["dp_replicate=2", "pp=2 mb=2"])
@pytest.mark.parametrize("has_branch", [False, True])
def test_all_ranks_reject_losses_that_cannot_be_put_together(pool: Pool, plan: str, has_branch: bool) -> None:
    for said in pool.run(step_of_ragged_ranks, 2, plan, has_branch):
        assert ("for one microbatch and" if has_branch else "some labels or elements do not count") in said


@on_ranks(2)
def test_a_loop_that_was_left_as_it_was_is_rejected_before_ranks_part(world: World) -> None:
    """The last batch has one sample: one rank would take a step that the other does not."""
    run = Run("fp32", world=world)
    data = TensorDataset(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))
    model = nn.Linear(4, 3)
    prepared: Any = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=2))
    model, optimizer, loader = prepared

    def left_as_it_was() -> None:
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    with pytest.raises(ShoalError, match=r"(?s)from the loader itself.*run.step\(batch\)"):
        left_as_it_was()
