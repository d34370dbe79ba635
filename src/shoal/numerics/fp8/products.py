"""Matrices of 8-bit floats, and their products.

A GPU multiplies two matrices of 8-bit floats that both have the summed dim last, and then by two numbers: the scales
that brought them into the range of such floats. A CPU computes the same of the same values in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.autograd_function import as_output

PRECISE = torch.float8_e4m3fn
"""3 bits of fraction, up to 448: for weights and activations."""
FAR = torch.float8_e5m2
"""2 bits of fraction, up to 57,344 and down to 1e-5: for gradients."""
MULTIPLE = 16
"""Sizes of matrices are multiples of it."""


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """A matrix in 8-bit floats; times `scale`, it is what it stands for."""

    values: Tensor
    scale: Tensor

    def transposed(self) -> ScaledTensor:
        """The same values the other way around."""
        return ScaledTensor(self.values.T.contiguous(), self.scale)


def factor_for(x: Tensor, kind: torch.dtype) -> Tensor:
    """What brings the largest number of x to the largest of a kind of 8-bit floats."""
    return _factor(x.abs().max(), kind)


def to_scaled(x: Tensor, factor: Tensor, kind: torch.dtype) -> ScaledTensor:
    """A matrix times a factor, in a kind of 8-bit floats; by rows, however x lies in memory, as products want it."""
    return ScaledTensor((x.float() * factor).to(kind).contiguous(), factor.reciprocal())


def transposed(x: Tensor) -> ScaledTensor:
    """A matrix transposed, scaled so that its largest number is the largest of `PRECISE`."""
    low, high = torch.aminmax(x)
    factor = _factor(torch.maximum(-low, high), PRECISE)
    if x.is_cuda:
        from shoal.numerics.kernels.fp8 import transpose  # Triton, which CPUs do not have

        values = transpose(x, factor)
    else:
        values = (x.float() * factor).to(PRECISE).T.contiguous()
    return ScaledTensor(values, factor.reciprocal())


def _factor(largest: Tensor, kind: torch.dtype) -> Tensor:
    return torch.finfo(kind).max / largest.float().clamp(min=1e-30)


def product(a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """a times b transposed: both have the summed dim last. Sums are kept in float32; `fast`: with the fewer bits
    that the matrix units of a Hopper have for them, as is customary in a forward."""
    if not a.values.is_cuda:
        with torch.autocast("cpu", enabled=False):  # a compiled backward is in that of its forward
            return as_output(((a.values.float() @ b.values.float().T) * (a.scale * b.scale)).to(dtype))
    found: Tensor = torch._scaled_mm(
        a.values, b.values.T, scale_a=a.scale, scale_b=b.scale, out_dtype=dtype, use_fast_accum=fast
    )
    return found
