"""Lion and the moving average of weights under every way to cut tensors: as on one device, and through a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shoal
from shoal.comm.world import World
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import Pool, on_ranks
from tests.dist.test_split_by_hand import Net, samples
from tests.rejects import rejects

STEPS, DECAY = 3, 0.75


def lion(model: nn.Module) -> shoal.Lion:
    return shoal.Lion(model.parameters(), lr=0.05, weight_decay=0.1)


def loss_of(model: nn.Module) -> Tensor:
    inputs, labels = samples()
    return nn.functional.cross_entropy(model(inputs), labels)


def one_device() -> tuple[nn.Module, nn.Module]:
    model = Net().double()
    average, optimizer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)), lion(model)
    own = shoal.EMA(model, DECAY)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        average.update_parameters(model)
        own.update()
    for name, parameter in average.module.named_parameters():
        assert torch.equal(own.averages[name], parameter)
    return model, average.module


def start(world: World, plan: str) -> tuple[Run, nn.Module]:
    run = Run(f"fp64 {plan}", world=world)
    split = {"tensor": run.tensor} if "tp" in plan else {}
    model = Net(shoal.ColumnParallelLinear, shoal.RowParallelLinear, **split) if split else Net()
    return run, run.prepare(model, lion(model))[0]


def share(run: Run) -> Any:
    part = len(samples()[0]) // run.degree
    return tuple(each[run.coordinate * part : (run.coordinate + 1) * part] for each in samples())


def trained(world: World, plan: str, folder: Path) -> tuple[Any, ...]:
    """Weights and averages after some steps; the losses of both; and the averages that a new run has loaded."""
    run, _ = start(world, plan)
    ema = shoal.EMA(run, DECAY)
    with rejects("T054", "run.ema"):
        shoal.EMA(run)
    for _ in range(STEPS):
        run.step(share(run))
        ema.update()
    own = run.evaluate([share(run)])
    with ema.applied():
        averaged, averages = run.evaluate([share(run)]), run.weights()
    run.save(folder)
    again, _ = start(world, plan)
    loaded = shoal.EMA(again, DECAY)
    again.load(folder)
    with loaded.applied():
        found = again.weights()
    assert loaded.num_updates == STEPS
    late, _ = start(world, plan)
    late.load(folder)
    with rejects("T055", "run.load"):
        shoal.EMA(late)
    return run.weights(), averages, found, own, averaged, run.evaluate([share(run)])


@pytest.mark.parametrize("plan", [wide("zero=0"), wide("zero=1"), "zero=2", "zero=3", wide("tp=2")])
def test_lion_and_its_average_are_those_of_one_device(pool: Pool, tmp_path: Path, plan: str) -> None:
    weights, averages, loaded, own, averaged, own_again = pool.run(trained, 2, plan, tmp_path)[0]
    model, average = one_device()
    for found, expected in ((weights, model), (averages, average), (loaded, average)):
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-10, atol=1e-12)
    losses = loss_of(model).item(), loss_of(average).item(), loss_of(model).item()
    assert (own, averaged, own_again) == pytest.approx(losses, rel=1e-10)


def test_averages_that_cannot_be() -> None:
    with rejects("T052", 1.0):
        shoal.EMA(nn.Linear(2, 2), decay=1.0)


@on_ranks(2)
def test_replicas_with_weights_of_their_own(world: World) -> None:
    run, _ = start(world, "sync=local:2")
    with rejects("T053", "sync=local:2"):
        shoal.EMA(run)


@on_ranks(1)
def test_parameters_that_are_unfrozen_later(world: World, tmp_path: Path) -> None:
    run, model = start(world, "zero=0")
    frozen = next(iter(dict(model.named_parameters())))
    model.get_parameter(frozen).requires_grad_(False)
    ema = shoal.EMA(run, DECAY)
    assert frozen not in ema.averages
    run.step(share(run))
    ema.update()
    run.save(tmp_path)  # without its average
    model.get_parameter(frozen).requires_grad_(True)
    ema.update()
    begun = model.get_parameter(frozen).detach().clone()
    run.step(share(run))
    ema.update()
    expected = DECAY * begun + (1 - DECAY) * model.get_parameter(frozen).detach()
    torch.testing.assert_close(ema.averages[frozen], expected)
    run.load(tmp_path)
    assert torch.equal(ema.averages[frozen], begun)
    run.step(share(run))
    run.save(tmp_path / "later")
    again, model = start(world, "zero=0")
    model.get_parameter(frozen).requires_grad_(False)
    loaded = shoal.EMA(again, DECAY)
    with rejects("T106", frozen):
        again.load(tmp_path / "later")
    assert frozen not in loaded.averages


@on_ranks(1)
def test_an_average_begins_with_the_loaded_weights(world: World, tmp_path: Path) -> None:
    run, _ = start(world, "zero=0")
    run.step(share(run))
    run.save(tmp_path)  # without an average
    trained = run.weights()
    for only_weights in (False, True):
        again, _ = start(world, "zero=0")
        ema = shoal.EMA(again, DECAY)
        for _ in range(2):
            again.step(share(again))
            ema.update()
        again.load(tmp_path, only_weights=only_weights)
        with ema.applied():
            found = again.weights()
        assert all(torch.equal(found[name], weight) for name, weight in trained.items())
