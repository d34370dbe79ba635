"""Lion against the formula of its paper, Muon against torch's, and which optimizers may update pieces of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import shoal
from shoal.blueprint.plan import Plan
from shoal.config.checks.optimizers import check_whole_tensors
from shoal.config.load import build_recipe
from shoal.numerics.optim.elementwise import ELEMENTWISE, is_elementwise
from shoal.numerics.optim.groups import moments_of
from shoal.train.optim.checks import check_rounding, check_whole
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


def test_muon_is_that_of_torch() -> None:
    """In float32, where both compute in bfloat16 and round differently. Everything else is AdamW's."""
    torch.manual_seed(0)
    shapes = [(8, 24), (24, 8), (16, 16)]
    ours, theirs = ([nn.Parameter(torch.ones(shape) / 16) for shape in shapes] for _ in range(2))
    bias, torchs_bias = (nn.Parameter(torch.ones(5)) for _ in range(2))
    groups = [{"params": [bias], "algorithm": "adamw", "weight_decay": 0.0}, {"params": ours}]
    optimizer = shoal.Muon(groups, lr=0.01, weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([torchs_bias], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(4):
        for own, other in zip([*ours, bias], [*theirs, torchs_bias], strict=True):
            own.grad = torch.randn(own.shape)
            other.grad = own.grad.clone()
        for each in (optimizer, reference, adamw):
            each.step()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0.0, atol=0.01 * 0.2 * 24**0.5 * 0.02)  # of an update, 2 %
    torch.testing.assert_close(bias, torchs_bias)
    again = shoal.Muon(groups, lr=0.01)
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[ours[0]]["momentum_buffer"], optimizer.state[ours[0]]["momentum_buffer"])
    assert float(again.state[bias]["step"]) == 4


def test_options_of_muon_lamb_and_lars() -> None:
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    with rejects("T070", [2], "shoal.muon_groups"):
        shoal.Muon([matrix, vector], lr=0.1)
    with rejects("T036", "algorithm", "sgd"):
        shoal.Muon([{"params": [matrix], "algorithm": "sgd"}], lr=0.1)
    for kind in (shoal.Muon, shoal.LARS):
        with rejects("T036", "momentum", 1.0):
            kind([matrix], lr=0.1, momentum=1.0)
    with rejects("T036", "betas", 1.0):
        shoal.LAMB([matrix], lr=0.1, betas=(0.9, 1.0))
    for optimizer in (shoal.Muon([matrix], lr=0.1), shoal.LAMB([matrix], lr=0.1)):
        with rejects("T037", type(optimizer).__name__):
            optimizer.step(lambda: None)


class Net(nn.Module):
    """An embedding, two blocks with an embedding of their own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"linear": nn.Linear(4, 4), "positions": nn.Embedding(3, 4), "conv": nn.Conv1d(4, 4, 1)})
            for _ in range(2)
        )
        self.head = nn.Linear(4, 5)


class Described(Net):
    def describe(self) -> shoal.Description:
        return shoal.Description(blocks=("blocks.0", "blocks.1"))


def test_groups_of_muon() -> None:
    model = Described()
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices, others, vectors = shoal.muon_groups(model, weight_decay=0.2)
    assert [names[p] for p in matrices["params"]] == ["blocks.0.linear.weight", "blocks.1.linear.weight"]
    assert (matrices["algorithm"], others["algorithm"], vectors["algorithm"]) == ("muon", "adamw", "adamw")
    assert (matrices["weight_decay"], others["weight_decay"], vectors["weight_decay"]) == (0.2, 0.2, 0.0)
    assert "embed.weight" in [names[p] for p in others["params"]]
    assert all(p.ndim == 1 for p in vectors["params"])
    assert sum(len(group["params"]) for group in (matrices, others, vectors)) == len(names)
    with rejects("T071", "Net", "no blocks"):
        shoal.muon_groups(Net())


def test_numbers_that_optimizers_keep_for_a_parameter() -> None:
    model = Described()
    blocks = ("blocks.0", "blocks.1")
    for name, optimizer in (
        ("muon", shoal.Muon(shoal.muon_groups(model), lr=0.1)),
        ("adafactor", torch.optim.Adafactor(model.parameters())),
    ):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        kept = sum(value.numel() for state in optimizer.state.values() for key, value in state.items() if key != "step")
        moments = moments_of(name, model, blocks)
        assert moments is not None
        assert kept == pytest.approx(moments * sum(p.numel() for p in model.parameters()))
    assert moments_of("adamw", model, blocks) is None


class Own(Optimizer):
    """Of a script: plain descent, by the norm of a tensor if `trusts`."""

    def __init__(self, params: Any, trusts: bool) -> None:
        super().__init__(params, {"lr": 0.0})
        self.trusts = trusts

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    trusts = group.get("trusts", self.trusts)
                    ratio = weight.norm() / weight.grad.norm() if trusts else 1.0
                    weight -= group["lr"] * ratio * weight.grad


def test_optimizers_of_whole_tensors_are_found() -> None:
    weight = [nn.Parameter(torch.zeros(4, 4))]
    assert is_elementwise(Own(weight, trusts=False))
    of_tensors = [Own(weight, trusts=True), torch.optim.Adafactor(weight), torch.optim.Muon(weight)]
    assert not any(map(is_elementwise, [*of_tensors, torch.optim.LBFGS(weight)]))
    joined = [shoal.Muon([{"params": weight, "algorithm": "adamw"}], lr=0.1), shoal.LAMB(weight, lr=0.1)]
    assert not any(map(is_elementwise, joined))
    mixed = Own(weight, trusts=False)
    mixed.add_param_group({"params": [nn.Parameter(torch.zeros(4, 4))], "trusts": True})
    assert not is_elementwise(mixed)  # in its second group alone
    assert not weight[0].any()  # nothing of the script's has changed
    assert not of_tensors[0].state


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_known_ones_are_elementwise(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind is torch.optim.Adagrad and torch.__version__ < "2.13":
        pytest.skip("makes its state when it is created, so it cannot be tried; it is known, as the test's list says")
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


@pytest.mark.parametrize("kind", [shoal.Muon, shoal.LAMB, shoal.LARS])
def test_plans_that_those_of_shoal_do_not_know(kind: Any) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(4, 4))], lr=0.1)
    for words in ("zero=3", "zero=1", "dp_replicate=2 zero=3 dp_shard=2", "pp=2"):
        assert not list(check_whole(optimizer, Plan.of(words).resolve(4)))
    for words, named in (("tp=2", "tp=2"), ("ep=2", "ep=2"), ("zero=3 offload=optimizer", "offload=optimizer")):
        (problem,) = check_whole(optimizer, Plan.of(words).resolve(4))
        assert problem.code == "T051"
        assert named in problem.what
    assert [problem.code for problem in check_rounding(optimizer, torch.bfloat16)] == ["T003"]


@pytest.mark.parametrize(
    ("name", "plan", "codes"),
    [
        ("muon", "zero=3", []),
        ("muon", "tp=2", ["T051"]),
        ("lamb", "ep=2", ["T051"]),
        ("lars", "zero=1 offload=optimizer", ["T051"]),
        ("adafactor", "dp_replicate=2 pp=2", []),
        ("adafactor", "zero=1", ["T051"]),
        ("adafactor", "dp_replicate=4 sync=local:2", ["T072"]),
        ("adamw", "tp=2 zero=3", []),
    ],
)
def test_recipes_are_checked_before_a_process_starts(name: str, plan: str, codes: list[str]) -> None:
    recipe = build_recipe({"optim": {"name": name}, "plan": plan}, title="test")
    assert [problem.code for problem in check_whole_tensors(recipe, recipe.plan.resolve(4))] == codes
