"""The backward of silu(gate) · up, or of GELU for silu, on a GPU: every tensor is read once and written once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _swiglu_backward(  # type: ignore[no-untyped-def]
    joint, d_gated, d_joint, gated, width,
    recompute: tl.constexpr, activation: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    here = column < width
    place = row * 2 * width + column  # of the gate; `up` is `width` further on
    gate = tl.load(joint + place, mask=here, other=0.0).to(tl.float32)
    up = tl.load(joint + place + width, mask=here, other=0.0).to(tl.float32)
    d = tl.load(d_gated + row * width + column, mask=here, other=0.0).to(tl.float32)
    if activation == "silu":
        open_part = 1.0 / (1.0 + tl.exp(-gate))
        value = gate * open_part
        slope = open_part + value * (1.0 - open_part)
    elif activation == "gelu":
        open_part = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        value = gate * open_part
        slope = open_part + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    else:  # tanh(u) = 1 - 2 / (1 + exp(2 u)), which neither end of the range breaks
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * u))
        open_part = 0.5 * (1.0 + tanh)
        value = gate * open_part
        slope = open_part + 0.5 * gate * (1.0 - tanh * tanh) * 0.7978845608028654 * (1.0 + 0.134145 * gate * gate)
    tl.store(d_joint + place, (d * up * slope).to(d_joint.dtype.element_ty), mask=here)
    tl.store(d_joint + place + width, (d * value).to(d_joint.dtype.element_ty), mask=here)
    if recompute:
        tl.store(gated + row * width + column, (up * value).to(gated.dtype.element_ty), mask=here)


def swiglu_backward_in_one_pass(
    joint: Tensor, d_gated: Tensor, d_joint: Tensor, gated: Tensor, *, recompute: bool, activation: str
) -> None:
    """Fill the gradient of the joint tensor and, with `recompute`, silu(gate) · up."""
    width = d_gated.shape[-1]
    launch: Any = _swiglu_backward[(d_gated.numel() // width, triton.cdiv(width, _BLOCK))]
    launch(
        joint, d_gated, d_joint, gated, width,
        recompute=recompute, activation=activation, block=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
