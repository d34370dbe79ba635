"""A scheduler of a script's own is saved and loaded with its run: a resumed loop has the bits of an uninterrupted one.

`run.save` used to keep the learning rate of the moment and to lose the scheduler: after `run.load` the schedule began
again, with a learning rate of 0.0213 where the uninterrupted run had 0.0073.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs
from torch.optim.lr_scheduler import LRScheduler

from shoal.blueprint.description import Description
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.train.run import Run
from tests.dist.pool import Pool, on_ranks

BREAK, END = 3, 7


class Ramp:
    """A callable object, whose state torch saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0 / (1 + step + self.calls)


Make = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Make] = {
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR of an object": lambda o: lrs.LambdaLR(o, Ramp()),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.95),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 2, 5], 0.5),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=2), lrs.CosineAnnealingLR(o, 6)], milestones=[4]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, 2), lrs.ExponentialLR(o, 0.8)]),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.2, total_steps=10),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=2, mode="exp_range", gamma=0.9),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, threshold=0.5),
}


class Chain(nn.Module):
    """Small, and cut into stages between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out

    def describe(self) -> Description:
        return Description(blocks=("blocks.0", "blocks.1"), before_blocks=("first",), after_blocks=("last",))


def own_run(world: World, kind: str, plan: str = "", order: str = "together") -> tuple[Run, list[Any]]:
    """A run, and its schedulers, which are prepared with, before or after the optimizer."""
    torch.manual_seed(0)
    model = Chain().double()
    run = Run(f"fp64 mb=2 {plan}", world=world, seed=3)
    optimizer = torch.optim.AdamW(
        [{"params": model.first.parameters()}, {"params": [*model.blocks.parameters(), *model.last.parameters()]}],
        lr=0.05,
    )
    schedulers = [SCHEDULERS[one](optimizer) for one in kind.split(" and ")]
    if order == "together":
        run.prepare(*schedulers, optimizer, model)
    elif order == "before":
        run.prepare(*schedulers)
        run.prepare(model, optimizer)
    else:
        run.prepare(model, optimizer)
        run.prepare(*schedulers)
    return run, schedulers


def batch_of(run: Run, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (8,), generator=generator)
    size = 8 // run.degree
    own = slice(run.coordinate * size, (run.coordinate + 1) * size)
    return inputs[own], labels[own]


def train(run: Run, schedulers: list[Any], stop: int) -> list[str]:
    """Losses and everything that the groups of the optimizer say, bit for bit."""
    told = []
    while run.steps_done < stop:
        loss = float(run.step(batch_of(run, run.steps_done)))
        for scheduler in schedulers:
            scheduler.step(loss) if isinstance(scheduler, lrs.ReduceLROnPlateau) else scheduler.step()
        groups = [{name: group[name] for name in ("lr", "betas")} for group in run.optimizer.param_groups]
        told.append(f"{loss.hex()} {groups}")
    return told


def weights_of(run: Run) -> dict[str, Tensor]:
    return run.weights()


def uninterrupted_and_resumed(world: World, kind: str, plan: str, order: str, folder: Path) -> None:
    whole, schedulers = own_run(world, kind, plan, order)
    expected = train(whole, schedulers, END)
    first, schedulers = own_run(world, kind, plan, order)
    told = train(first, schedulers, BREAK)
    first.save(folder)
    again, schedulers = own_run(world, kind, plan, order)
    assert again.load(folder) == BREAK
    assert told + train(again, schedulers, END) == expected
    ours, theirs = weights_of(again), weights_of(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", [*SCHEDULERS, "StepLR and LambdaLR"])
@on_ranks(1)
def test_a_resumed_loop_has_the_bits_of_an_uninterrupted_one(world: World, tmp_path: Path, kind: str) -> None:
    uninterrupted_and_resumed(world, kind, "", "together", tmp_path)


@pytest.mark.parametrize(("kind", "plan"), [("OneCycleLR", ""), ("LambdaLR", "zero=3"), ("SequentialLR", "pp=2")])
@on_ranks(2)
def test_it_has_on_two_ranks(world: World, tmp_path: Path, kind: str, plan: str) -> None:
    uninterrupted_and_resumed(world, kind, plan, "together", tmp_path)


@pytest.mark.parametrize("order", ["before", "after"])
@on_ranks(1)
def test_the_optimizer_is_prepared_before_or_after(world: World, tmp_path: Path, order: str) -> None:
    uninterrupted_and_resumed(world, "StepLR", "", order, tmp_path)


def saved_by(world: World, kind: str, plan: str, folder: Path) -> list[str]:
    run, schedulers = own_run(world, kind, plan)
    train(run, schedulers, BREAK)
    run.save(folder)
    return train(run, schedulers, END)


def loaded_by(world: World, kind: str, plan: str, folder: Path) -> list[str]:
    run, schedulers = own_run(world, kind, plan)
    run.load(folder)
    return train(run, schedulers, END)


@pytest.mark.parametrize(
    ("was", "now"), [((2, "zero=3"), (1, "")), ((2, "pp=2"), (2, "zero=0")), ((1, ""), (2, "pp=2"))]
)
def test_it_is_loaded_on_another_layout(pool: Pool, tmp_path: Path, was: tuple[int, str], now: tuple[int, str]) -> None:
    saved = pool.run(saved_by, was[0], "OneCycleLR", was[1], tmp_path)
    loaded = pool.run(loaded_by, now[0], "OneCycleLR", now[1], tmp_path)
    rates = [[line.partition(" ")[2] for line in lines] for lines in (*saved, *loaded)]
    assert all(one == rates[0] for one in rates)
    losses = [[float.fromhex(line.split()[0]) for line in lines] for lines in (*saved, *loaded)]
    assert all(one == pytest.approx(losses[0], rel=1e-10) for one in losses)


class Odd(LRScheduler):
    """Has a state that no JSON can hold."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.shape = object()
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        return [group["lr"] for group in self.optimizer.param_groups]


@on_ranks(1)
def test_what_does_not_fit_is_rejected_with_the_fix(world: World, tmp_path: Path) -> None:
    run, schedulers = own_run(world, "StepLR")
    train(run, schedulers, 1)
    run.save(tmp_path / "with")
    for kind, what in (
        ("LambdaLR", "were StepLR, and are LambdaLR"),
        ("StepLR and StepLR", "were StepLR, and are StepLR, StepLR"),
    ):
        with pytest.raises(ShoalError, match=what):
            own_run(world, kind)[0].load(tmp_path / "with")

    def without() -> Run:
        model = Chain().double()
        run = Run("fp64 mb=2", world=world, seed=3)
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        return run

    with pytest.raises(ShoalError, match=r"state of 1 scheduler \(StepLR\).*prepared none(.|\n)*fix: run.prepare"):
        without().load(tmp_path / "with")
    plain = without()
    plain.step(batch_of(plain, 0))
    plain.save(tmp_path / "none")
    with pytest.raises(ShoalError, match=r"has no state of a scheduler(.|\n)*run.prepare\(scheduler\) after run.load"):
        own_run(world, "StepLR")[0].load(tmp_path / "none")
    with pytest.raises(ShoalError, match=r"Odd\.shape is a object(.|\n)*fix: "):
        plain.prepare(Odd(plain.optimizer))
    with pytest.raises(ShoalError, match="another optimizer"):
        plain.prepare(lrs.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), 2))
    with pytest.raises(ShoalError, match="prepare cannot place a dict"):
        plain.prepare({})


@on_ranks(1)
def test_a_scheduler_that_was_not_prepared_is_reported(world: World, tmp_path: Path) -> None:
    model = Chain().double()
    run = Run("fp64 mb=2", world=world)
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = lrs.StepLR(optimizer, 2)
    train_plain = [float(run.step(batch_of(run, 0))), scheduler.step()]
    assert math.isfinite(train_plain[0] or 0.0)
    with pytest.warns(UserWarning, match=r"not saved.*run\.prepare\(scheduler\)"):
        run.save(tmp_path)
    with pytest.warns(UserWarning, match=r"not moved to step 1.*run\.prepare\(scheduler\)"):
        run.load(tmp_path)
    run.save(tmp_path, extra={"schedule": scheduler.state_dict()})  # the script saves it, and no warning is due


@on_ranks(1)
def test_a_dropped_update_does_not_step_the_scheduler(world: World) -> None:
    """The script alone steps its scheduler; it asks the report whether an update was made."""
    run, (scheduler,) = own_run(world, "StepLR")
    run.updates.on_nan = "skip"
    inputs, labels = batch_of(run, 0)
    run.step((inputs, labels))
    scheduler.step()
    run.step((inputs * math.nan, labels))
    assert run.report is not None
    assert run.report.was_skipped
    assert scheduler.last_epoch == 1
    assert run.steps_done == 2
