"""An optimizer that evaluates other weights than it trains: a run evaluates, returns and saves the right ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shoal
from shoal.config.load import build_recipe
from shoal.numerics.optim.elementwise import is_elementwise
from tests.rejects import rejects

BETA = 0.9


class ScheduleFree(Optimizer):
    """SGD of the library `schedulefree`, in few lines: parameters are y in training, and x in evaluation."""

    def __init__(self, params: Any, lr: float) -> None:
        numbers = {"k": 0, "weight_sum": 0.0, "lr_max": -1.0, "train_mode": False}
        super().__init__(params, {"lr": lr, **numbers})

    def _switch(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], weight)
                group["train_mode"] = training

    def train(self) -> None:
        self._switch(True, 1 - BETA)

    def eval(self) -> None:
        self._switch(False, 1 - 1 / BETA)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["train_mode"]
            group["weight_sum"] += group["lr"] ** 2
            part, lr = group["lr"] ** 2 / group["weight_sum"], group["lr"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, part).add_(p.grad, alpha=lr * (BETA * (1 - part) - 1))
                z.sub_(p.grad, alpha=lr)
            group["k"] += 1


def kinds() -> list[Any]:
    if importlib.util.find_spec("schedulefree") is None:
        return [ScheduleFree]
    import schedulefree

    return [ScheduleFree, schedulefree.AdamWScheduleFree, schedulefree.SGDScheduleFree]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64), torch.randint(2, (4,), generator=generator)


def start(kind: Any) -> tuple[shoal.Run, nn.Module, Any]:
    torch.manual_seed(0)
    run, model = shoal.Run("fp64", device="cpu"), nn.Linear(3, 2)
    _, optimizer = run.prepare(model, kind(model.parameters(), lr=0.5))
    optimizer.train()
    return run, model, optimizer


@pytest.mark.parametrize("kind", kinds())
def test_a_run_knows_both_weights(tmp_path: Path, kind: Any) -> None:
    run, model, optimizer = start(kind)
    for step in range(3):
        run.step(batch(step))
    trained = model.weight.detach().clone()
    found, loss = run.weights(), run.evaluate([batch(9)])
    torch.testing.assert_close(model.weight.detach(), trained, rtol=1e-14, atol=1e-15)
    run.save(tmp_path)
    optimizer.eval()
    assert not torch.allclose(model.weight, trained)
    torch.testing.assert_close(found["weight"], model.weight.detach(), rtol=1e-13, atol=1e-14)
    assert loss == pytest.approx(nn.functional.cross_entropy(model(batch(9)[0]), batch(9)[1]).item(), rel=1e-12)
    assert loss == pytest.approx(run.evaluate([batch(9)]), rel=1e-12)  # in this mode already
    optimizer.train()
    again, other, _ = start(kind)
    again.load(tmp_path)
    for step in range(3, 5):
        run.step(batch(step))
        again.step(batch(step))
    torch.testing.assert_close(other.weight, model.weight, rtol=1e-13, atol=1e-14)
    assert is_elementwise(kind([nn.Parameter(torch.zeros(4, 4))], lr=0.1))


def test_an_average_beside_it_is_rejected() -> None:
    run, _, _ = start(ScheduleFree)
    shoal.EMA(run)
    run.step(batch(0))
    with rejects("T073", "ScheduleFree", "EMA"):
        run.evaluate([batch(9)])


def test_recipes_have_none() -> None:
    with rejects("T074", "schedule_free"):
        build_recipe({"optim": {"name": "schedule_free"}}, title="test")
