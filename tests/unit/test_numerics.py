"""Learning rate, clipping, loss scale and optimizer groups against plain arithmetic and plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shoal.config.recipe import OptimSection
from shoal.numerics.gradients import LossScale, clip_coefficient, global_norm, gradients_of, norms_of, scale_
from shoal.numerics.lr_schedule import lr_factor, scaled_lr
from shoal.numerics.optim.build import build_optimizer, set_lr
from shoal.numerics.precision import PRECISIONS, SLOW, precision_of, slow_here, times_longer
from tests.rejects import rejects


def test_warmup_rises_linearly_and_reaches_the_peak() -> None:
    factors = [lr_factor("cosine", (step + 1) / 100, warmup=0.1, final=0.1) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert max(factors) == factors[9] == 1.0


@pytest.mark.parametrize(("kind", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_schedules_end_where_they_should(kind: str, middle: float) -> None:
    assert lr_factor(kind, 0.5, final=0.1) == pytest.approx(middle)
    assert lr_factor(kind, 1.0, final=0.1) == pytest.approx(1.0 if kind == "constant" else 0.1)


def test_cosine_is_a_cosine() -> None:
    assert lr_factor("cosine", 0.25) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


@pytest.mark.parametrize("warmup", [1.0, 2.0])
def test_warmup_over_the_whole_run_and_longer_only_rises(warmup: float) -> None:
    factors = [lr_factor("linear", done, warmup=warmup, final=0.3) for done in (0.25, 0.5, 1.0)]
    assert factors == pytest.approx([0.25 / warmup, 0.5 / warmup, 1.0 / warmup])


def test_linear_scaling_rule() -> None:
    assert scaled_lr(0.1, batch=1024, tuned_for_batch=256) == pytest.approx(0.4)
    assert scaled_lr(0.1, batch=1024, tuned_for_batch=None) == 0.1


def gradients(seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((3, 4), (5,), ())]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 10
    return parameters


@pytest.mark.parametrize("largest", [0.5, 1e6])
def test_clipping_equals_torch(largest: float) -> None:
    ours, theirs = gradients(), gradients()
    expected = nn.utils.clip_grad_norm_(theirs, largest)
    norm = global_norm(norms_of(gradients_of(ours)))
    scale_(gradients_of(ours), clip_coefficient(norm, largest))
    assert torch.equal(norm, expected)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=0, atol=0)


def test_parameters_without_gradients_are_passed_over() -> None:
    parameters = gradients()
    parameters[1].grad = None
    assert len(gradients_of(parameters)) == 2
    assert float(global_norm([])) == 0.0


def test_loss_scale_halves_and_doubles() -> None:
    scale = LossScale(1024.0, window=2)
    scale.overflowed()
    assert scale.scale == 512.0
    scale.succeeded()
    assert scale.scale == 512.0
    scale.succeeded()
    assert scale.scale == 1024.0
    scale.succeeded()
    scale.overflowed()
    scale.succeeded()
    assert scale.scale == 512.0  # an overflow starts the window anew


def test_loss_scale_stops_at_one_and_never_moves_when_static() -> None:
    scale = LossScale(1.5, window=2)
    scale.overflowed()
    assert scale.is_exhausted
    static = LossScale()
    for _ in range(5000):
        static.succeeded()
    assert static.scale == 1.0


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("implementation", ["auto", "fused", "foreach", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_implementation_makes_the_same_steps(name: str, implementation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    start = nn.Linear(5, 3).to(dtype)
    model = nn.Linear(5, 3).to(dtype)
    model.load_state_dict(start.state_dict())
    optimizer = build_optimizer(model.parameters(), OptimSection(name=name, implementation=implementation), lr=0.1)
    groups = [{"params": [start.weight], "weight_decay": 0.1}, {"params": [start.bias], "weight_decay": 0.0}]
    reference: torch.optim.Optimizer
    if name == "adamw":
        reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), foreach=False)
    else:
        reference = torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)
    data = torch.randn(4, 5, dtype=dtype)
    for factor in (1.0, 0.5, 0.25):
        set_lr(optimizer, factor)
        for group in reference.param_groups:
            group["lr"] = 0.1 * factor
        for network, optim in ((model, optimizer), (start, reference)):
            network(data).square().sum().backward()
            optim.step()
            optim.zero_grad()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for mine, reference_parameter in zip(model.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(mine, reference_parameter, rtol=tolerance, atol=tolerance)


def test_auto_is_fused_on_a_cpu() -> None:
    optimizer = build_optimizer(nn.Linear(2, 2).parameters(), OptimSection(), lr=0.1)
    assert all(group["fused"] for group in optimizer.param_groups)


def test_nothing_to_train_is_refused() -> None:
    with rejects("M052"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False).parameters(), OptimSection(), lr=0.1)


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_precision_decides_what_a_matmul_computes_in(name: str, dtype: torch.dtype) -> None:
    seen = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    precision_of(name).install(model, torch.device("cpu"))
    assert model(torch.ones(1, 2)).dtype == torch.float32
    assert seen == [dtype]
    assert PRECISIONS[name].scales_loss == (name == "fp16")


def test_a_precision_that_cannot_be_trained_in_is_refused() -> None:
    with rejects("R050", match="fp4"):
        precision_of("fp4")


@pytest.mark.alone
def test_who_computes_in_a_precision_that_the_cpu_has_not_is_told() -> None:
    assert any(times_longer(torch.float32) < SLOW for _ in range(5))  # a CPU that is shared has slow moments
    cpu, bf16 = torch.device("cpu"), PRECISIONS["bf16"]
    assert slow_here(PRECISIONS["fp32"], cpu) is None
    assert slow_here(bf16, torch.device("cuda")) is None
    told, times = slow_here(bf16, cpu), sorted(times_longer(torch.bfloat16) for _ in range(5))[2]
    if times > 10 * SLOW:
        assert told is not None
        assert "--plan.precision fp32" in told
    elif times < SLOW / 4:
        assert told is None
