"""FlashAttention 4 where it cannot run. tests/gpu compares its results."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoal.numerics.kernels.flash_attention_4 import forward, rule_of
from shoal.numerics.ops.attention_kernels import attended
from tests.rejects import rejects


def test_a_cpu_has_its_own_kernel() -> None:
    q = torch.randn(1, 2, 8, 16)
    torch.testing.assert_close(attended(q, q, q, causal=True, backend="fa4"), attended(q, q, q, causal=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="it may be installed")
def test_a_call_that_it_does_not_take_is_rejected_by_name() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 96, dtype=torch.bfloat16, device="cuda")
        with rejects("M081", "heads of 96 in bfloat16 without a mask"):
            attended(q, q, q, causal=True, backend="fa4")


def test_its_operator_has_shapes_and_a_backward_without_a_gpu() -> None:
    """As `torch.compile` sees it: queries (B, T, N, H) with fewer key heads."""
    with FakeTensorMode():
        q, k = (torch.empty(2, 8, n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2))
        out, lse = forward(q, k, k, None, rule_of(scale=0.125, softcap=None, window=None, causal=True))
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 8), torch.float32)
        dq, dk = torch.autograd.grad(out.sum(), [q, k])
        assert (dq.shape, dk.shape) == (q.shape, k.shape)
