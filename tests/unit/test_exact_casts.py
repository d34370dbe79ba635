"""Casts to float32 inside of a verification in float64."""

from __future__ import annotations

import torch

from shoal.verification.exact_casts import FUNCTIONS, keeping_float64


def test_functions_and_methods_keep_float64() -> None:
    """DiffLlama sums by torch.sum(..., dtype=torch.float32): its gradients were off by 1e-7."""
    x = torch.tensor([1e-9, 1.0], dtype=torch.float64)
    with keeping_float64("fp64", is_foreign=True):
        for name in FUNCTIONS:
            assert getattr(torch, name)(x, dim=0, dtype=torch.float32).dtype == torch.float64, name
            assert getattr(torch, name)(input=x, dim=0, dtype=torch.float32).dtype == torch.float64, name
            assert getattr(x, name)(dim=0, dtype=torch.float32).dtype == torch.float64, name
        assert x.float().dtype == x.to(torch.float32).dtype == torch.float64
        assert torch.sum(torch.ones(2)).dtype == torch.float32
    assert torch.sum(x, dtype=torch.float32).dtype == x.float().dtype == torch.float32
