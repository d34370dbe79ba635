"""Optimizers of torch in a script: losses and weights of plain torch under shards, whether they are built before
`prepare` or after it; or rejected before the first step.

Adagrad has state from its construction on, so one that was built before was called used. Rprop ended in a traceback of
DTensor in its first step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.config.recipe import OptimSection
from shoal.numerics.optim.build import build_optimizer
from shoal.train.run import Run
from tests.dist.pool import Pool, on_ranks
from tests.rejects import rejects

STEPS, BATCH = 3, 8
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3)).double()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two, each with its own rate and decay."""
    matrices, others = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "lr": 1e-2, "weight_decay": 0.1}, {"params": others, "lr": 3e-2}]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, BATCH, 5, generator=generator, dtype=torch.float64)
    return list(zip(inputs, torch.randint(3, (STEPS, BATCH), generator=generator), strict=True))


def train(world: World, name: str, is_before: bool) -> tuple[list[float], dict[str, Tensor]]:
    kind, options = OPTIMIZERS[name]
    run, model = Run("fp64 zero=3 mb=2", world=world), build()
    if is_before:
        run.prepare(model, kind(groups(model), **options))
    else:
        run.prepare(model)
        run.prepare(kind(groups(run.module), **options))
    share = slice(run.coordinate * BATCH // run.degree, (run.coordinate + 1) * BATCH // run.degree)
    losses = [run.step((x[share], y[share])).item() for x, y in batches()]
    return losses, run.weights()


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_an_optimizer_of_torch_is_that_of_one_process(pool: Pool, name: str, is_before: bool) -> None:
    kind, options = OPTIMIZERS[name]
    model, expected = build(), []
    optimizer = kind(groups(model), **options)
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    losses, weights = pool.run(train, 2, name, is_before)[0]
    assert losses == pytest.approx(expected, rel=1e-12)
    for own, parameter in model.named_parameters():
        assert float((weights[own] - parameter.detach()).abs().max()) < 1e-12, own


@on_ranks(2)
def test_rprop_is_rejected_before_its_first_step(world: World) -> None:
    model = build()
    with rejects("T103", "Rprop", "zero=3"):
        Run("fp64 zero=3", world=world).prepare(model, torch.optim.Rprop(model.parameters()))


@on_ranks(2)
def test_a_fused_sgd_is_rejected_before_its_first_step(world: World) -> None:
    for plan in ("zero=3", "zero=1 offload=optimizer"):  # which copies nothing on a CPU
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        with rejects("T103", "fused", plan.split()[0], "fused=False"):
            Run(f"fp64 {plan}", world=world).prepare(model, optimizer)


@pytest.mark.parametrize("plan", ["zero=1", "zero=3"])
@on_ranks(2)
def test_the_sgd_of_a_recipe_knows_shards(world: World, plan: str) -> None:
    """Its fused kernel ended in a traceback of DTensor in its first step."""
    run = Run(f"fp64 {plan}", world=world, loss=lambda model, x: model(x).square().mean())
    model = run.prepare(build())
    optimizer = build_optimizer(model.parameters(), OptimSection(name="sgd", momentum=0.9), lr=0.1)
    run.prepare(optimizer)
    before = run.weights()
    run.step(torch.ones(2, 5, dtype=torch.float64))
    after = run.weights()  # of rank 0
    assert not world.is_main or not any(torch.equal(before[name], after[name]) for name in after)


@on_ranks(2)
def test_an_adagrad_that_has_made_steps_is_rejected(world: World) -> None:
    model = build()
    optimizer = torch.optim.Adagrad(model.parameters())
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    with rejects("T026"):
        Run("fp64 zero=3", world=world).prepare(model, optimizer)


@on_ranks(2)
def test_a_parameter_of_no_model_is_rejected(world: World) -> None:
    model = build()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    with rejects("T027", "1 of 7"):
        Run("fp64", world=world).prepare(model, optimizer)
