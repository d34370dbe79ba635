"""The backward of silu(gate) · up, where gate and up are one joint tensor, as one product yields them.

    joint = [gate | up]        d_gated ─▶ d_joint = [d_gate | d_up],  and gated again, if it was not saved

A compiler writes a joint tensor in two passes, and reads the inputs of both halves in each. On a GPU it is one kernel
here, and an opaque operator for the compiler; elsewhere plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, library

from shoal.numerics.precision import wide


def swiglu_backward(
    parts: Sequence[Tensor], d_gated: Tensor, *, recompute: bool
) -> tuple[Sequence[Tensor], Tensor | None]:
    """Return the gradients of gate and up in the form that they are given: separate, or one joint tensor. With
    `recompute`, also return silu(gate) · up."""
    if len(parts) == 1 and d_gated.is_cuda and d_gated.dtype.itemsize < 8:
        d_joint, gated = torch.ops.shoal.swiglu_backward(parts[0], d_gated, recompute)
        return [d_joint], gated if recompute else None
    gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
    wide_gate, wide_up = gate.to(wide(gate.dtype)), up.to(wide(up.dtype))
    open_part = torch.sigmoid(wide_gate)
    silu = wide_gate * open_part
    gated = (wide_up * silu).to(gate.dtype) if recompute else None
    d = d_gated.to(silu.dtype)
    d_gate = (d * wide_up * (open_part + silu * (1.0 - open_part))).to(gate.dtype)
    d_up = (d * silu).to(up.dtype)
    return [d_gate, d_up] if len(parts) == 2 else [torch.cat([d_gate, d_up], -1)], gated


library.define("shoal::swiglu_backward", "(Tensor joint, Tensor d_gated, bool recompute) -> (Tensor, Tensor)")


@library.impl("shoal::swiglu_backward", "CUDA")
def _on_gpu(joint: Tensor, d_gated: Tensor, recompute: bool) -> tuple[Tensor, Tensor]:
    from shoal.numerics.kernels.swiglu import swiglu_backward_in_one_pass  # Triton, which CPUs do not have

    d_joint, gated = _shapes(joint, d_gated, recompute)
    swiglu_backward_in_one_pass(joint.contiguous(), d_gated.contiguous(), d_joint, gated, recompute=recompute)
    return d_joint, gated


@library.register_fake("shoal::swiglu_backward")  # type: ignore[untyped-decorator]
def _shapes(joint: Tensor, d_gated: Tensor, recompute: bool) -> tuple[Tensor, Tensor]:
    gated = torch.empty(d_gated.shape if recompute else (0,), dtype=joint.dtype, device=joint.device)
    return torch.empty(joint.shape, dtype=joint.dtype, device=joint.device), gated
