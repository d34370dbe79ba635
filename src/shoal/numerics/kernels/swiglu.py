"""The backward of silu(gate) · up on a GPU: every tensor is read once and written once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _swiglu_backward(  # type: ignore[no-untyped-def]
    joint, d_gated, d_joint, gated, width, recompute: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    here = column < width
    place = row * 2 * width + column  # of the gate; `up` is `width` further on
    gate = tl.load(joint + place, mask=here, other=0.0).to(tl.float32)
    up = tl.load(joint + place + width, mask=here, other=0.0).to(tl.float32)
    d = tl.load(d_gated + row * width + column, mask=here, other=0.0).to(tl.float32)
    open_part = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * open_part
    d_gate = d * up * (open_part + silu * (1.0 - open_part))
    tl.store(d_joint + place, d_gate.to(d_joint.dtype.element_ty), mask=here)
    tl.store(d_joint + place + width, (d * silu).to(d_joint.dtype.element_ty), mask=here)
    if recompute:
        tl.store(gated + row * width + column, (up * silu).to(gated.dtype.element_ty), mask=here)


def swiglu_backward_in_one_pass(
    joint: Tensor, d_gated: Tensor, d_joint: Tensor, gated: Tensor, *, recompute: bool
) -> None:
    """Fill the gradient of the joint tensor and, with `recompute`, silu(gate) · up."""
    width = d_gated.shape[-1]
    launch: Any = _swiglu_backward[(d_gated.numel() // width, triton.cdiv(width, _BLOCK))]
    launch(joint, d_gated, d_joint, gated, width, recompute=recompute, block=_BLOCK, num_warps=_WARPS)
