"""Weights in bfloat16, rounded at random (`optim.param_dtype`): what they learn, and what they cannot be used with."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.config.recipe import OptimSection
from shoal.numerics.gradients import norms_of
from shoal.numerics.optim import adamw_update
from shoal.numerics.optim.adamw import AdamW
from shoal.numerics.optim.build import build_optimizer
from shoal.train.run import Run
from tests.rejects import rejects


def test_changes_far_below_a_step_add_up() -> None:
    """Between 1 and 2 a bfloat16 has steps of 1/128; each update here is a fiftieth of one."""
    parameter = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = AdamW([parameter], lr=2**-7 / 50, weight_decay=0.0)
    for _ in range(100):
        parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
    assert float(parameter.float().mean().detach()) == pytest.approx(1 + 2 * 2**-7, abs=3e-4)


def nearest(x: Tensor, generator: torch.Generator) -> Tensor:
    return x.to(torch.bfloat16)


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Which of eight directions a point lies in."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        angle = torch.rand(64, generator=generator) * 8
        points = torch.stack([(angle * torch.pi / 4).cos(), (angle * torch.pi / 4).sin()], dim=-1)
        found.append((points, angle.long()))
    return found


def prepared(weights: Any, lr: float, states: Any = "fp32") -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 8))
    run = Run("bf16", device="cpu", param_dtype=weights, clip=1.0)
    run.prepare(model)
    section = OptimSection(param_dtype=weights, state_dtype=states, weight_decay=0.0)
    run.prepare(build_optimizer(run.parameters, section, lr=lr))
    return run


def losses(weights: Any, lr: float, steps: int) -> list[float]:
    with prepared(weights, lr) as run:
        return [float(run.step(batch)) for batch in batches(steps)]


@pytest.mark.wide
def test_it_learns_as_with_weights_in_fp32_and_rounding_to_the_nearest_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mean of the last twenty losses is within 3 %. The learning rate is small: most updates are below a step."""
    lr, steps = 5e-4, 200
    exact = losses("fp32", lr, steps)
    narrow = losses("bf16", lr, steps)
    monkeypatch.setattr(adamw_update, "stochastically_rounded", nearest)
    rounded = losses("bf16", lr, steps)
    ends = [sum(found[-20:]) / 20 for found in (exact, narrow, rounded)]
    assert exact[0] - ends[0] > 0.3, ends
    assert ends[1] == pytest.approx(ends[0], rel=0.03)
    assert ends[2] - ends[0] > 5 * abs(ends[1] - ends[0]), ends


def test_dtypes_of_a_run() -> None:
    with prepared("bf16", 1e-3, "bf16") as run:
        loss = run.step(batches(1)[0])
        kinds = {parameter.dtype for parameter in run.parameters}
        states = {state["exp_avg"].dtype for state in run.optimizer.state.values()}
        assert run.report is not None
        assert run.report.grad_norm.dtype == torch.float32
    assert (loss.dtype, kinds, states) == (torch.float32, {torch.bfloat16}, {torch.bfloat16})


def test_norms_of_gradients_of_several_kinds_are_not_rounded_to_the_least() -> None:
    norms = norms_of([torch.full((1000,), 1.0, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)])
    assert [norm.dtype for norm in norms] == [torch.float32] * 2
    assert [float(norm) for norm in norms] == pytest.approx([1000**0.5] * 2, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_of_a_large_gradient_in_host_memory_is_exact(dtype: torch.dtype) -> None:
    """Added up in one piece it was 0.5 % too small, and so clipping too weak."""
    x = torch.full((3, 2**23 + 1), 0.75, dtype=dtype)
    for one in (x, x.t()):
        (norm,) = norms_of([one])
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert float(norm) == pytest.approx(0.75 * x.numel() ** 0.5, rel=1e-5)


def test_norms_of_gradients_in_bf16_are_not_rounded_to_it() -> None:
    gradient = torch.full((999,), 0.5, dtype=torch.bfloat16)
    (norm,) = norms_of([gradient])
    assert float(norm) == pytest.approx(0.5 * 999**0.5, rel=1e-6)


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_a_run_goes_on_with_the_same_bits(states: str, tmp_path: Path) -> None:
    given = batches(6)
    with prepared("bf16", 1e-3, states) as run:
        for number, batch in enumerate(given):
            run.step(batch)
            if number == 2:
                run.save(tmp_path)
        whole = {name: tensor.clone() for name, tensor in run.weights().items()}
    with prepared("bf16", 1e-3, states) as run:
        assert run.load(tmp_path) == 3
        for batch in given[3:]:
            run.step(batch)
        again = run.weights()
    assert all(tensor.dtype == torch.bfloat16 and torch.equal(tensor, again[name]) for name, tensor in whole.items())


@pytest.mark.parametrize(("saved", "loaded"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_a_run_does_not_go_on_with_weights_of_another_kind(saved: str, loaded: str, tmp_path: Path) -> None:
    with prepared(saved, 1e-3, "fp32") as run:
        run.step(batches(1)[0])
        run.save(tmp_path)
    with prepared(loaded, 1e-3, "fp32") as run, rejects("C018", match=r"param_dtype was b?float\d\d"):
        run.load(tmp_path)


@pytest.mark.parametrize(("saved", "loaded"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", None), (None, "bf16")])
def test_a_run_does_not_go_on_with_states_of_another_kind(
    saved: str | None, loaded: str | None, tmp_path: Path
) -> None:
    """The moments kept the precision that they were saved in, whatever the optimizer said; torch's fell over them."""

    def going_with(states: str | None) -> Run:
        model = nn.Linear(4, 4)
        run = Run(device="cpu", loss=lambda model, x: model(x).square().mean())
        made = (
            torch.optim.AdamW(model.parameters())
            if states is None
            else AdamW(model.parameters(), lr=1e-3, state_dtype=states)
        )
        run.prepare(model, made)
        return run

    with going_with(saved) as run:
        run.step(torch.ones(2, 4))
        run.save(tmp_path)
    with going_with(loaded) as run, rejects("C018", match=r"state_dtype was (bf16|fp32), and is (bf16|fp32)"):
        run.load(tmp_path)
    with going_with("fp32" if saved is None else saved) as run:  # torch's and shoal's own are the same then
        assert run.load(tmp_path) == 1
        run.step(torch.ones(2, 4))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_that_rounds_to_the_nearest_is_refused(kind: Any) -> None:
    """1,897 of 65,920 weights changed in 20 steps where 53,248 do in float32, without a word."""
    model = nn.Linear(4, 4)
    with Run("bf16", device="cpu", param_dtype="bf16") as run, rejects("T003", "shoal.AdamW"):
        run.prepare(model, kind(model.parameters(), lr=1e-5))


@pytest.mark.parametrize("precision", ["fp32", "fp64", "fp16"])
def test_which_precisions_it_is_for(precision: str) -> None:
    with rejects("P047") as caught:
        Run(precision, device="cpu", param_dtype="bf16")
    fix = str(caught.value).partition("fix: ")[2]
    assert fix == "param_dtype='fp32', or Run('bf16')"  # what a script can say: it has no options of a command


@pytest.mark.parametrize("word", ["sync=diloco:10", "compress=int8"])
def test_what_it_is_not_built_for(word: str) -> None:
    with rejects("P048", match=word):
        Run(f"bf16 {word}", device="cpu", param_dtype="bf16")


def test_torch_and_own_copies_take_them_alike() -> None:
    """A copy of an optimizer rounds as the first one does."""
    one = nn.Parameter(torch.ones(64, 8, dtype=torch.bfloat16))
    other = nn.Parameter(one.detach().clone())
    first, second = (AdamW([p], lr=1e-3, state_dtype="bf16") for p in (one, other))
    for step in range(3):
        for parameter, optimizer in ((one, first), (other, second)):
            parameter.grad = torch.randn(64, 8, generator=torch.Generator().manual_seed(step)).bfloat16()
            optimizer.step()
    assert torch.equal(one, other)
    assert copy.deepcopy(first).state_dict()["param_groups"][0]["num_calls"] == 3
