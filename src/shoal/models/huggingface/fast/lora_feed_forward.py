"""Gated feed-forwards whose layers have LoRA: the input of the last one is not saved, but computed again.

The frozen W needs no input in its backward. A and B do (h = act(gate) · up, z = s · A h, y = W h + B z):

    d_B = d_yᵀ z      d_z = s · d_y B      d_A = d_zᵀ h      d_h = d_y W + d_z A

So gate, up and z are saved, which is narrow, and h is computed again: F of 3F features less in each token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.autograd_function import differentiable_once
from shoal.models.huggingface.fast.probe import Swapped
from shoal.numerics.ops.memory_saving_linear import is_plain, without_autocast
from shoal.numerics.ops.swiglu import Activation, activated, swiglu_backward
from shoal.numerics.precision import compute_dtype
from shoal.parallel.lora.layers import LoRALinear


class FastLoRAFeedForward(Swapped):
    """A gated feed-forward with LoRA that saves gate and up, and computes their product again."""

    layer_names: tuple[str, str, str]
    gate_activation: Activation

    def forward(self, x: Tensor) -> Tensor:
        """x_BTD → y_BTD."""
        gate, up, down = (getattr(self, name) for name in self.layer_names)
        return swiglu_lora(gate(x), up(x), down, self.gate_activation)


def swiglu_lora(gate: Tensor, up: Tensor, layer: Any, activation: Activation) -> Tensor:
    """Apply a layer with LoRA to act(gate) · up. Dropout needs its input, which is then saved."""
    is_known = type(layer) is LoRALinear and is_plain(layer) and not layer.weight.requires_grad
    if not is_known or not torch.is_grad_enabled() or (layer.lora_dropout and layer.training):
        called: Tensor = layer(activated(gate, activation) * up)
        return called
    dtype = compute_dtype(gate)
    with without_autocast(gate):
        weights = layer.weight, layer.lora_A, layer.lora_B
        y: Tensor = _SwigluLoRA.apply(gate.to(dtype), up.to(dtype), *weights, layer.lora_scale, activation)  # type: ignore[no-untyped-call]
        return y if layer.bias is None else y + layer.bias.to(dtype)


class _SwigluLoRA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, activation: Activation
    ) -> Tensor:
        h = activated(gate, activation) * up
        z = F.linear(h, a.to(h.dtype)) * scale
        ctx.save_for_backward(gate, up, weight, a, b, z)
        ctx.scale, ctx.activation = scale, activation
        return F.linear(h, weight.to(h.dtype)) + F.linear(z, b.to(h.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        gate, up, weight, a, b, z = ctx.saved_tensors
        (d_y,) = grads
        d_z = d_y @ b.to(d_y.dtype) * ctx.scale
        d_h = d_y @ weight.to(d_y.dtype) + d_z @ a.to(d_y.dtype)
        (d_gate, d_up), h = swiglu_backward([gate, up], d_h, recompute=True, activation=ctx.activation)
        assert h is not None
        d_a = (d_z.flatten(0, -2).T @ h.flatten(0, -2)).to(a.dtype)
        d_b = (d_y.flatten(0, -2).T @ z.flatten(0, -2)).to(b.dtype)
        return d_gate, d_up, None, d_a, d_b, None, None
