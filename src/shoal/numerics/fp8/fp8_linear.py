"""A linear layer whose products are of 8-bit floats, with one dynamic scale per tensor.

    y = x Wᵀ        dx = dy W        dW = dyᵀ x        x and W in `PRECISE`, dy in `FAR`

torchao has such a layer. It rounds dW to bfloat16 and then casts it to the weight's float32 in a kernel of its own.
Here the product writes dW in float32. The code is written for torch.compile, which fuses casts with what precedes them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.autograd_function import differentiable_once
from shoal.numerics.fp8.products import FAR, MULTIPLE, PRECISE, factor_for, product, to_scaled
from shoal.numerics.precision import compute_dtype


class Fp8Linear(nn.Linear):
    """A linear layer in fp8, with the parameters of the layer that it was converted from."""

    @classmethod
    def of(cls, layer: nn.Linear) -> None:
        """Convert a layer, which stays the same object."""
        assert type(layer) is nn.Linear
        layer.__class__ = cls

    def forward(self, x: Tensor) -> Tensor:
        """Compute in autocast's precision."""
        x = x.to(compute_dtype(x))
        with torch.autocast(x.device.type, enabled=False):
            rows = x.reshape(-1, x.shape[-1])
            # The gradient of the weight sums over rows, so their number is padded. No rows have no maximum.
            missing = MULTIPLE * max(1, -(-len(rows) // MULTIPLE)) - len(rows)
            padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
            y: Tensor = _Fp8Product.apply(padded, self.weight)  # type: ignore[no-untyped-call]
            y = (y[: len(rows)] if missing else y).reshape(*x.shape[:-1], self.out_features)
            return y if self.bias is None else y + self.bias.to(y.dtype)


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        for_x, for_weight = factor_for(x, PRECISE), factor_for(weight, PRECISE)
        ctx.save_for_backward(x, weight, for_x, for_weight)
        return product(to_scaled(x, for_x, PRECISE), to_scaled(weight, for_weight, PRECISE), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        x, weight, for_x, for_weight = ctx.saved_tensors
        dy = to_scaled(grads[0], factor_for(grads[0], FAR), FAR)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = product(dy, to_scaled(weight, for_weight, PRECISE).transposed(), grads[0].dtype)
        if ctx.needs_input_grad[1]:
            dw = product(dy.transposed(), to_scaled(x, for_x, PRECISE).transposed(), weight.dtype)
        return dx, dw
