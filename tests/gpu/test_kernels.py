"""Kernels of shoal's own against float64, at sizes that fit their blocks and at sizes that do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.numerics.adamw import AdamW
from shoal.numerics.embedding import embedded
from shoal.numerics.gradients import norms_of
from shoal.numerics.norm_backward import _plainly, norm_backward
from shoal.numerics.rotary import turned_heads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; CI has none, run by hand with one"),
]


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected.double()).norm() / expected.double().norm()).detach())


@pytest.mark.parametrize("width", [64, 96, 2048, 3072, 5120])
@pytest.mark.parametrize("num_gradients", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 3e-3), (torch.float32, 1e-6)])
def test_the_backward_of_a_norm(width: int, num_gradients: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(width + num_gradients)
    x, of_x, *d_normed = torch.randn(2 + num_gradients, 7, 101, width, device="cuda").to(dtype)
    scale = torch.randn(width, device="cuda")
    inverse = (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    found = norm_backward(d_normed, of_x, x, scale, inverse)
    exact = [part.double() for part in d_normed]
    expected = _plainly(exact, of_x.double(), x.double(), scale.double(), inverse.double())
    # Three gradients are summed up in their own precision first.
    bounds = (bound, bound if num_gradients == 3 and dtype == torch.bfloat16 else 1e-5, bound)
    assert [part.dtype for part in found] == [dtype, torch.float32, dtype]
    assert all(relative(a, b) < most for a, b, most in zip(found, expected, bounds, strict=True))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "features"), [(32, 8, 64), (24, 8, 128), (3, 1, 80), (20, 20, 128)]
)
@pytest.mark.parametrize("batch_of_angles", [1, 2])
@pytest.mark.parametrize("is_strided", [False, True])
def test_heads_are_turned_and_joined(
    num_heads: int, num_kv_heads: int, features: int, batch_of_angles: int, is_strided: bool
) -> None:
    torch.manual_seed(features)
    joint = torch.randn(2, 33, (num_heads + 2 * num_kv_heads) * features, device="cuda").bfloat16().requires_grad_()
    angles = torch.randn(batch_of_angles, 33, features // 2, device="cuda")
    degrees = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    found = turned_heads(joint, angles.cos(), angles.sin(), **degrees)
    exact = joint.detach().double().requires_grad_()
    expected = turned_heads(exact, angles.double().cos(), angles.double().sin(), **degrees)  # which has no kernel
    assert all(relative(a, b) < 3e-3 for a, b in zip(found, expected, strict=True))
    assert all(x.is_contiguous() for x in found)
    grads = [torch.randn_like(x) for x in found]
    if is_strided:  # as an attention kernel may give them: heads before tokens
        grads = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in grads]
    torch.autograd.backward(found, grads)
    torch.autograd.backward(expected, [grad.double() for grad in grads])
    assert joint.grad is not None
    assert exact.grad is not None
    assert relative(joint.grad, exact.grad) < 3e-3


def test_times_a_number_of_the_device() -> None:
    from shoal.numerics.cross_entropy_kernel import times_

    x, factor = torch.randn(1001, 33, device="cuda"), torch.tensor(1 / 3, device="cuda")
    expected = x.double() * factor.double()
    assert relative(times_(x, factor, torch.bfloat16), expected) < 3e-3
    assert relative(times_(x, factor, torch.float32), expected) < 1e-7
    assert relative(x, expected) < 1e-7, "it was not done in place"


def test_norms_of_gradients_in_bf16() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(size, device="cuda").bfloat16() for size in (1, 4096, 4097, 5_000_001)]
    for norm, gradient in zip(norms_of(gradients), gradients, strict=True):
        assert relative(norm, gradient.double().norm()) < 1e-6


@pytest.mark.parametrize("width", [64, 1536, 2048])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_rows_of_an_embedding(width: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(width)
    layer = nn.Embedding(1000, width, device="cuda", dtype=dtype)
    tokens = torch.randint(0, 900, (4, 257), device="cuda")
    tokens[0, :200] = 7  # one that is everywhere, and a hundred that are nowhere
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = embedded(tokens, layer)
    assert torch.equal(found, layer.weight[tokens].bfloat16())
    grad = torch.randn_like(found)
    (gradient,) = torch.autograd.grad(found, (layer.weight,), grad)
    expected = torch.zeros(1000, width, dtype=torch.float64, device="cuda")
    expected.index_add_(0, tokens.flatten(), grad.double().flatten(0, 1))
    assert gradient.dtype == dtype
    assert relative(gradient, expected) < bound
    assert not gradient[900:].any()


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_weights_in_bf16_are_updated_as_in_float64_but_for_their_rounding(states: str) -> None:
    """One step: every weight is one of the two bfloat16 beside the exact one, and their mean has no bias."""
    torch.manual_seed(0)
    start = torch.randn(4097, 257, device="cuda").bfloat16()
    gradient = torch.randn_like(start)
    weight = nn.Parameter(start.clone())
    exact = nn.Parameter(start.double())
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    weight.grad, exact.grad = gradient.clone(), gradient.double()
    AdamW([weight], states=states, **options).step()  # type: ignore[arg-type]
    torch.optim.AdamW([exact], **options).step()
    apart = weight.double() - exact
    step = exact.detach().abs().log2().floor().sub(7).exp2()  # between two bfloat16 of that size
    assert float((apart.abs() / step).max().detach()) <= 1.01
    bias = float((apart / step).mean().detach())
    assert abs(bias) < 5 * 0.41 / weight.numel() ** 0.5
    changed = float((apart / step).abs().mean().detach())
    assert changed > 0.05, "nothing was rounded at random"


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_changes_far_below_a_step_add_up(states: str) -> None:
    parameter = nn.Parameter(torch.ones(65536, dtype=torch.bfloat16, device="cuda"))
    optimizer = AdamW([parameter], lr=2**-7 / 50, weight_decay=0.0, states=states)  # type: ignore[arg-type]
    for _ in range(100):
        parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
    assert float(parameter.float().mean().detach()) == pytest.approx(1 + 2 * 2**-7, abs=1e-4)
