"""Kernels of shoal's own against float64, at sizes that fit their blocks and at sizes that do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "features"), [(32, 8, 64), (24, 8, 128), (3, 1, 80), (20, 20, 128)])
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
