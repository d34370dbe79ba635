"""Products of 8-bit floats, by hand: for those that are not a linear layer's.

A GPU multiplies two matrices of 8-bit floats that both have the summed dim last, and then by two numbers: the scales
that brought them into the range of such floats. A CPU computes the same of the same values in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PRECISE = torch.float8_e4m3fn
"""3 bits of fraction, up to 448: for weights and activations."""
FAR = torch.float8_e5m2
"""2 bits of fraction, up to 57,344 and down to 1e-5: for gradients."""
MULTIPLE = 16
"""Sizes of matrices are multiples of it."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """A matrix in 8-bit floats; times `scale`, it is what it stands for."""

    values: Tensor
    scale: Tensor


def turned(x: Tensor) -> Narrow:
    """A matrix turned around, scaled so that its largest number is the largest of `PRECISE`."""
    low, high = torch.aminmax(x)
    largest = torch.maximum(-low, high).float().clamp(min=1e-30)
    factor = torch.finfo(PRECISE).max / largest
    if x.is_cuda:
        from shoal.numerics.fp8_kernel import turn  # Triton, which CPUs do not have

        values = turn(x, factor)
    else:
        values = (x.float() * factor).to(PRECISE).T.contiguous()
    return Narrow(values, factor.reciprocal())


def product(a: Narrow, b: Narrow, dtype: torch.dtype) -> Tensor:
    """a times b turned around: both have the summed dim last. Sums are kept in float32."""
    if not a.values.is_cuda:
        return ((a.values.float() @ b.values.float().T) * (a.scale * b.scale)).to(dtype)
    whole: Any = F.ScalingType.TensorWise
    return F.scaled_mm(
        a.values, b.values.T, a.scale, whole, b.scale, whole, output_dtype=dtype, use_fast_accum=False
    )  # fmt: skip
