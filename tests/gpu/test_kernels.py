"""Kernels of shoal's own against float64, at sizes that fit their blocks and at sizes that do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.numerics.gradients import norms_of
from shoal.numerics.ops.embedding import embedded
from shoal.numerics.ops.rms_norm import _plainly, norm_backward
from shoal.numerics.ops.rotary import rotate_heads
from shoal.numerics.ops.swiglu import swiglu_backward
from shoal.numerics.ops.transposed_matmul import times_transposed
from shoal.numerics.optim.adamw import AdamW

if torch.cuda.is_available():  # Triton
    from shoal.numerics.kernels.cross_entropy import exponentials_, times

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


@pytest.mark.parametrize("width", [64, 2048, 6912])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 3e-3), (torch.float16, 4e-4), (torch.float32, 1e-6)])
def test_the_backward_of_gates(width: int, recompute: bool, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(width)
    joint, d_gated = torch.randn(7, 101, 2 * width, device="cuda") * 3, torch.randn(7, 101, width, device="cuda")
    joint, d_gated = joint.to(dtype), d_gated.to(dtype)
    (d_joint,), gated = swiglu_backward([joint], d_gated, recompute=recompute)
    exact = joint.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = F.silu(gate) * up
    expected.backward(d_gated.double())
    assert exact.grad is not None
    assert d_joint.dtype == dtype
    assert relative(d_joint, exact.grad) < bound
    assert (gated is not None) == recompute
    assert gated is None or relative(gated, expected.detach()) < bound


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
    found = rotate_heads(joint, angles.cos(), angles.sin(), **degrees)
    exact = joint.detach().double().requires_grad_()
    expected = rotate_heads(exact, angles.double().cos(), angles.double().sin(), **degrees)  # which has no kernel
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


@pytest.mark.parametrize("shape", [(2048, 8192), (100, 65), (64, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_a_weight_that_is_transposed(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(shape[0])
    grad, weight = torch.randn(33, shape[0], device="cuda").bfloat16(), torch.randn(shape, device="cuda").to(dtype)
    found = times_transposed(grad, weight)
    assert relative(found, grad.double() @ weight.bfloat16().double()) < 3e-3
    assert torch.equal(torch.ops.shoal.transposed(weight, torch.bfloat16), weight.T.bfloat16())


def test_times_a_number_of_the_device() -> None:
    x, factor = torch.randn(1001, 33, device="cuda"), torch.tensor(1 / 3, device="cuda")
    expected = x.double() * factor.double()
    assert relative(times(x, factor, torch.bfloat16), expected) < 3e-3
    assert relative(times(x, factor, torch.float32, is_in_place=True), expected) < 1e-7
    assert relative(x, expected) < 1e-7, "it was not done in place"
    before = x.clone()
    assert times(x, torch.ones((), device="cuda"), torch.float32, is_in_place=True) is x
    assert torch.equal(x, before)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-7), (torch.bfloat16, 3e-3)])
def test_times_a_number_for_each_row(dtype: torch.dtype, bound: float) -> None:
    x, factors = torch.randn(1001, 33, device="cuda").to(dtype), torch.rand(1001, device="cuda")
    factors[7] = 1.0
    expected = x.double() * factors.double()[:, None]
    assert relative(times(x, factors, dtype), expected) < bound
    assert relative(times(x, factors, dtype, is_in_place=True), expected) < bound
    assert relative(x, expected) < bound, "it was not done in place"


@pytest.mark.parametrize("vocabulary", [7, 4096, 32000, 128256])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])  # exp(-40) to 2e-6
@pytest.mark.parametrize("kind", ["usual", "rising", "masked", "sure"])
def test_a_gradient_but_for_a_number(vocabulary: int, dtype: torch.dtype, bound: float, kind: str) -> None:
    torch.manual_seed(vocabulary)
    whole = torch.full((65, vocabulary + 8), torch.nan, dtype=dtype, device="cuda")
    values = torch.randn(65, vocabulary, device="cuda") * 4
    labels = torch.randint(0, vocabulary, (65,), device="cuda")
    if kind == "rising":  # far beyond what a level may be below, several times in a row
        values += torch.linspace(-400, 100, vocabulary, device="cuda")
    if kind == "masked":
        values[:, : vocabulary // 2] = -torch.inf
        labels = labels.clamp(min=vocabulary // 2)
    if kind == "sure":  # a float32 knows little of p - 1 if it has p
        values.scatter_(1, labels[:, None], 30.0)
    logits = whole[:, :vocabulary].copy_(values)
    labels[::5] = -100
    exact = logits.double().detach().requires_grad_()
    expected = F.cross_entropy(exact, labels, ignore_index=-100, reduction="none")
    expected.sum().backward()
    losses, factors = exponentials_(logits, labels, ignore=-100, factor=1 / 3)
    assert float((losses - expected.detach()).abs().max()) < 1e-6 * max(5.0, float(expected.detach().max()))
    assert exact.grad is not None
    found = logits.double() * factors.double()[:, None] * 3
    assert not found[::5].any()
    assert all(relative(mine, theirs) < bound for mine, theirs in zip(found[1:5], exact.grad[1:5], strict=True))
    assert relative(found, exact.grad) < bound
    assert whole[:, vocabulary:].isnan().all(), "it wrote beside the logits"


def test_a_label_that_is_no_word_has_no_number_to_be_multiplied_by() -> None:
    logits, labels = torch.randn(4, 100, device="cuda"), torch.tensor([0, 100, 3, -1], device="cuda")
    losses, factors = exponentials_(logits, labels, ignore=-100, factor=1.0)
    assert losses.isnan().tolist() == factors.isnan().tolist() == [False, True, False, True]


def test_norms_of_gradients_in_bf16() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(size, device="cuda").bfloat16() for size in (1, 4096, 4097, 5_000_001)]
    for norm, gradient in zip(norms_of(gradients), gradients, strict=True):
        assert relative(norm, gradient.double().norm()) < 1e-6


def test_the_norm_of_a_gradient_of_nearly_as_many_numbers_as_32_bits_count() -> None:
    gradient = torch.zeros(2**31 - 4096, dtype=torch.bfloat16, device="cuda")
    gradient[0], gradient[-1] = 3.0, 4.0
    assert float(norms_of([gradient])[0]) == 5.0


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
    AdamW([weight], state_dtype=states, **options).step()  # type: ignore[arg-type]
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
    optimizer = AdamW([parameter], lr=2**-7 / 50, weight_decay=0.0, state_dtype=states)  # type: ignore[arg-type]
    for _ in range(100):
        parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
    assert float(parameter.float().mean().detach()) == pytest.approx(1 + 2 * 2**-7, abs=1e-4)
