"""Lion against the formula of its paper, and which optimizers may update pieces of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import shoal
from shoal.blueprint.plan import Plan
from shoal.numerics.optim.elementwise import ELEMENTWISE, is_elementwise
from shoal.train.checks import check_whole
from tests.rejects import rejects


def test_lion_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    expected, moment = weight.detach().clone(), torch.zeros(3, 4, dtype=torch.float64)
    optimizer = shoal.Lion([weight], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(4):
        gradient = torch.randn(3, 4, dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        update = torch.sign(0.9 * moment + 0.1 * gradient)
        expected = expected - 0.01 * (update + 0.1 * expected)
        moment = 0.99 * moment + 0.01 * gradient
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)
    with rejects("T036", "betas", 1.0):
        shoal.Lion([weight], betas=(0.9, 1.0))


class Own(Optimizer):
    """Of a script: plain descent, by the norm of a tensor if `trusts`."""

    def __init__(self, params: Any, trusts: bool) -> None:
        super().__init__(params, {"lr": 0.0})
        self.trusts = trusts

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    ratio = weight.norm() / weight.grad.norm() if self.trusts else 1.0
                    weight -= group["lr"] * ratio * weight.grad


def test_optimizers_of_whole_tensors_are_found() -> None:
    weight = [nn.Parameter(torch.zeros(4, 4))]
    assert is_elementwise(Own(weight, trusts=False))
    of_tensors = [Own(weight, trusts=True), torch.optim.Adafactor(weight), torch.optim.Muon(weight)]
    assert not any(map(is_elementwise, [*of_tensors, torch.optim.LBFGS(weight)]))
    assert not weight[0].any()  # nothing of the script's has changed
    assert not of_tensors[0].state


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_known_ones_are_elementwise(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.numerics.optim.elementwise.ELEMENTWISE", ())
    assert is_elementwise(kind([nn.Parameter(torch.zeros(4, 4))], lr=0.1))


def test_plans_that_cut_tensors() -> None:
    optimizer = torch.optim.Adafactor([nn.Parameter(torch.zeros(4, 4))])
    for words in ("zero=0", "pp=2", "zero=0 cp=2"):
        assert not list(check_whole(optimizer, Plan.of(words).resolve(2)))
    for words, named in (("zero=3", "zero=3"), ("zero=1", "zero=1"), ("tp=2", "tp=2")):
        (problem,) = check_whole(optimizer, Plan.of(words).resolve(2))
        assert problem.code == "T051"
        assert named in problem.what
