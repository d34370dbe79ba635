"""Grouped matrix products, and the gate of a feed-forward between them.

torch has a grouped matmul for bfloat16 on CUDA. Elsewhere it is one product per group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.autograd_function import differentiable_once

_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)  # private up to 2.11


def grouped_matmul(x_RD: Tensor, w_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply rows up to ends[0] by w[0], from there up to ends[1] by w[1], and so on."""
    if x_RD.is_meta or _is_traced(x_RD):  # only shapes matter, but every weight must be part of the graph
        return x_RD @ w_EDF.sum(0)
    if has_grouped_kernel(x_RD, w_EDF):
        y_RF: Tensor = _grouped_mm(x_RD, w_EDF, offs=ends_E)
    else:
        y_RF = _looped_matmul(x_RD, w_EDF, ends_E)
    return y_RF


def _is_traced(x: Tensor) -> bool:
    """Whether a trace of costs runs it without values. By its name: importing the class takes half a second."""
    return not torch.compiler.is_compiling() and type(x).__name__ == "FakeTensor"


def has_grouped_kernel(x_RD: Tensor, w_EDF: Tensor) -> bool:
    """Whether the device multiplies all groups at once: bfloat16 on CUDA, and rows that start at multiples of 16
    bytes."""
    if _grouped_mm is None or not x_RD.is_cuda or x_RD.dtype != torch.bfloat16 or x_RD.shape[0] == 0:
        return False
    is_aligned = x_RD.shape[1] % 8 == 0 and w_EDF.shape[2] % 8 == 0
    return is_aligned and _has_bfloat16_units(x_RD.get_device())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_bfloat16_units(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


# the length of each group is known on the host only
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _looped_matmul(x_RD: Tensor, w_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply once per expert, also for those without rows: their weights have a gradient too, zero."""
    counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    groups = zip(x_RD.split(counts), w_EDF.unbind(0), strict=True)
    return torch.cat([x @ w_DF for x, w_DF in groups])


def gated(gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor | None) -> Tensor:
    """Compute silu(gate) · up · weight."""
    if torch.compiler.is_compiling():  # the compiler decides by itself what to save
        product_RF = F.silu(gate_RF) * up_RF
        return product_RF if weight_R is None else product_RF * weight_R[:, None].to(product_RF.dtype)
    result: Tensor = _Gated.apply(gate_RF, up_RF, weight_R)  # type: ignore[no-untyped-call]
    return result


class _Gated(torch.autograd.Function):
    """Saves its inputs only: recomputing silu is cheaper than saving it."""

    @staticmethod
    def forward(ctx: Any, gate_RF: Tensor, up_RF: Tensor, weight_R: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_RF, up_RF, weight_R)
        product_RF = F.silu(gate_RF).mul_(up_RF)
        return product_RF if weight_R is None else product_RF.mul_(weight_R[:, None])  # rounded once, in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        gate_RF, up_RF, weight_R = ctx.saved_tensors
        with torch.enable_grad():
            gate_RF = gate_RF.detach().requires_grad_()
            silu_RF = F.silu(gate_RF)
        grad_RF, grad_weight_R = grads[0], None
        if weight_R is not None:
            grad_weight_R = (silu_RF.detach() * up_RF).mul_(grad_RF).sum(-1, dtype=weight_R.dtype)
            grad_RF = grad_RF * weight_R[:, None].to(grad_RF.dtype)
        (grad_gate_RF,) = torch.autograd.grad(silu_RF, gate_RF, grad_RF * up_RF)
        return grad_gate_RF, grad_RF * silu_RF.detach(), grad_weight_R
