"""The backward of silu(gate) · up, where gate and up are one joint tensor, as one product yields them. Also of GELU in
place of silu.

    joint = [gate | up]        d_gated ─▶ d_joint = [d_gate | d_up],  and gated again, if it was not saved

A compiler writes a joint tensor in two passes, and reads the inputs of both halves in each. On a GPU it is one kernel
here, and an opaque operator for the compiler; elsewhere plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, library

from shoal.numerics.precision import wide

Activation = Literal["silu", "gelu", "gelu_tanh"]


def activated(gate: Tensor, activation: Activation) -> Tensor:
    """Apply the function of the gate."""
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def swiglu_backward(
    parts: Sequence[Tensor], d_gated: Tensor, *, recompute: bool, activation: Activation = "silu"
) -> tuple[Sequence[Tensor], Tensor | None]:
    """Return the gradients of gate and up in the form that they are given: separate, or one joint tensor. With
    `recompute`, also return silu(gate) · up."""
    if len(parts) == 1 and d_gated.is_cuda and d_gated.dtype.itemsize < 8:
        d_joint, gated = torch.ops.shoal.swiglu_backward(parts[0], d_gated, recompute, activation)
        return [d_joint], gated if recompute else None
    gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
    wide_up = up.to(wide(up.dtype))
    value, slope = _value_and_slope(gate.to(wide(gate.dtype)), activation)
    gated = (wide_up * value).to(gate.dtype) if recompute else None
    d = d_gated.to(value.dtype)
    d_gate = (d * wide_up * slope).to(gate.dtype)
    d_up = (d * value).to(up.dtype)
    return [d_gate, d_up] if len(parts) == 2 else [torch.cat([d_gate, d_up], -1)], gated


def _value_and_slope(gate: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """The function of the gate, and its derivative."""
    if activation == "silu":
        open_part = torch.sigmoid(gate)
        silu = gate * open_part
        return silu, open_part + silu * (1.0 - open_part)
    if activation == "gelu":
        open_part = 0.5 * (1.0 + torch.erf(gate * math.sqrt(0.5)))
        return gate * open_part, open_part + gate * torch.exp(-0.5 * gate * gate) / math.sqrt(2.0 * math.pi)
    root, cubic = math.sqrt(2.0 / math.pi), 0.044715
    tanh = torch.tanh(root * (gate + cubic * gate * gate * gate))
    open_part = 0.5 * (1.0 + tanh)
    inner = root * (1.0 + 3.0 * cubic * gate * gate)
    return gate * open_part, open_part + 0.5 * gate * (1.0 - tanh * tanh) * inner


library.define(
    "shoal::swiglu_backward", "(Tensor joint, Tensor d_gated, bool recompute, str activation) -> (Tensor, Tensor)"
)


@library.impl("shoal::swiglu_backward", "CUDA")
def _on_gpu(joint: Tensor, d_gated: Tensor, recompute: bool, activation: str) -> tuple[Tensor, Tensor]:
    from shoal.numerics.kernels.swiglu import swiglu_backward_in_one_pass  # Triton, which CPUs do not have

    d_joint, gated = _shapes(joint, d_gated, recompute, activation)
    swiglu_backward_in_one_pass(
        joint.contiguous(), d_gated.contiguous(), d_joint, gated, recompute=recompute, activation=activation
    )
    return d_joint, gated


@library.register_fake("shoal::swiglu_backward")  # type: ignore[untyped-decorator]
def _shapes(joint: Tensor, d_gated: Tensor, recompute: bool, activation: str) -> tuple[Tensor, Tensor]:
    gated = torch.empty(d_gated.shape if recompute else (0,), dtype=joint.dtype, device=joint.device)
    return torch.empty(joint.shape, dtype=joint.dtype, device=joint.device), gated
