"""Matrices of 8-bit floats, and their products.

A GPU multiplies two matrices of 8-bit floats that both have the summed dim last, and the result by two numbers: the
scales that brought them into the range of such floats. A CPU computes the same from the same values in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.autograd_function import as_output

PRECISE = torch.float8_e4m3fn
"""3 mantissa bits, up to 448: for weights and activations."""
FAR = torch.float8_e5m2
"""2 mantissa bits, up to 57,344 and down to 1e-5: for gradients."""
MULTIPLE = 16
"""Sizes of matrices must be multiples of it."""


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """A matrix in 8-bit floats and its scale; the value is their product."""

    values: Tensor
    scale: Tensor

    def transposed(self) -> ScaledTensor:
        """Return the transpose."""
        return ScaledTensor(self.values.T.contiguous(), self.scale)


def factor_for(x: Tensor, kind: torch.dtype) -> Tensor:
    """Return the factor that brings the largest number of x to the largest of an 8-bit float type."""
    return _factor(x.abs().max(), kind)


def to_scaled(x: Tensor, factor: Tensor, kind: torch.dtype) -> ScaledTensor:
    """Convert x times a factor to an 8-bit float type, in row-major memory, as products need it."""
    return ScaledTensor((x.float() * factor).to(kind).contiguous(), factor.reciprocal())


def transposed(x: Tensor) -> ScaledTensor:
    """Transpose a matrix, and scale its largest number to the largest of `PRECISE`."""
    low, high = torch.aminmax(x)
    factor = _factor(torch.maximum(-low, high), PRECISE)
    if x.is_cuda:
        from shoal.numerics.kernels.fp8_transpose import transpose  # Triton, which CPUs do not have

        values = transpose(x, factor)
    else:
        values = (x.float() * factor).to(PRECISE).T.contiguous()
    return ScaledTensor(values, factor.reciprocal())


def _factor(largest: Tensor, kind: torch.dtype) -> Tensor:
    return torch.finfo(kind).max / largest.float().clamp(min=1e-30)


def product(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Multiply a by the transpose of b: both have the summed dim last. Sums are in float32. `fast`: with the fewer bits
    that the matrix units of a Hopper have for them, as is usual in a forward."""
    if not a.values.is_cuda:
        with torch.autocast("cpu", enabled=False):  # a compiled backward inherits the forward's autocast
            return as_output(((a.values.float() @ b.values.float().T) * (a.scale * b.scale)).to(dtype))
    found: Tensor = torch._scaled_mm(
        a.values, b.values.T, scale_a=a.scale, scale_b=b.scale, out_dtype=dtype, use_fast_accum=fast
    )
    return found
