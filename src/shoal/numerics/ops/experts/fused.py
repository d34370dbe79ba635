"""The experts of one GPU, from tokens to tokens, as one operator with a backward of its own.

Products are torch's grouped ones, and each step between them is one kernel:

    forward     tokens ─spread─▶ x ═▶ gate, up ─gate─▶ gated ═▶ y ─collect─▶ tokens             ═▶ grouped product
    backward    grad ─spread─▶ d_y ═▶ d_gated ─gate_backward─▶ d_gate, d_up ═▶ d_x ─collect─▶ d_tokens
                weights: d_yᵀ ═ gated,  [d_gate, d_up]ᵀ ═ x

Gate and up are one product. Saved are the tokens and gate and up; x and gated are computed again, and the weights are
cast again. The order of rows is computed on the device: the host waits for nothing.

Shapes: T tokens, k experts per token, R = T·k rows sorted by expert, D model dim, F feed-forward dim, G = 2·F, E
experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.numerics.ops.experts.grouped_matmul import grouped_matmul, has_grouped_kernel

_TENSOR_COPIES = (9, 0)
"""The first compute capability whose kernels can copy tiles of tensors (TMA), which the gradients of weights need."""


def has_fused_experts(x_TD: Tensor, down_LF: Tensor) -> bool:
    """Whether the kernels take such tokens and weights: bfloat16 on a Hopper GPU or newer, rows of whole 16 bytes."""
    is_plain = type(down_LF) in (Tensor, torch.nn.Parameter) and down_LF.dtype in (torch.float32, torch.bfloat16)
    if not x_TD.is_cuda or not is_plain:
        return False
    return has_grouped_kernel(x_TD, down_LF[None]) and _has_tensor_copies(x_TD.get_device())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_tensor_copies(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= _TENSOR_COPIES


def fused_experts(x_TD: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return for each token the sum over its experts of weight · down(silu(gate(x)) · up(x)). Weights are matrices of
    (experts · features) rows."""
    y_TD: Tensor = experts(x_TD.contiguous(), expert_Tk, weight_Tk.contiguous(), gate, up, down)[0]
    return y_TD


@torch.library.custom_op("shoal::experts", mutates_args=())
def experts(
    x_TD: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the output (T, D), and for the backward gate and up (R, G), the order of rows (R,), their places (T, k),
    and where those of each expert end (E,)."""
    from shoal.numerics.kernels import experts as kernel  # Triton, which CPUs do not have

    num_experts = down.shape[0] // x_TD.shape[1]
    order_R, place_Tk, ends_E = sorted_by_expert(expert_Tk, num_experts)
    x_RD = kernel.spread(x_TD, place_Tk)
    joint_RG = grouped_matmul(x_RD, kernel.joined(gate, up, num_experts).transpose(1, 2), ends_E)
    del x_RD
    gated_RF = kernel.gate(joint_RG, weight_Tk, order_R)
    y_RD = grouped_matmul(gated_RF, _cast(down, num_experts).transpose(1, 2), ends_E)
    return kernel.collect(y_RD, place_Tk), joint_RG, order_R, place_Tk, ends_E


@experts.register_fake
def _(x: Tensor, expert: Tensor, weight: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, ...]:
    num_rows = expert.shape[0] * expert.shape[1]
    joint = x.new_empty(num_rows, 2 * down.shape[1])
    places = expert.new_empty(expert.shape, dtype=torch.int64)
    ends = expert.new_empty(down.shape[0] // x.shape[1], dtype=torch.int32)
    return torch.empty_like(x), joint, expert.new_empty(num_rows, dtype=torch.int64), places, ends


@torch.library.custom_op("shoal::experts_backward", mutates_args=())
def experts_backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weight_Tk: Tensor,
    weights: list[Tensor],
    joint_RG: Tensor,
    rows: list[Tensor],
    has_weight_grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of tokens, of their weights, and of gate, up and down; the last three are empty if they are
    not needed. `weights`: gate, up and down. `rows`: order, places and ends."""
    from shoal.numerics.kernels import experts as kernel

    gate, up, down = weights
    order_R, place_Tk, ends_E = rows
    num_experts = len(ends_E)
    d_y_RD = kernel.spread(grad_TD, place_Tk)
    d_gated_RF = grouped_matmul(d_y_RD, _cast(down, num_experts), ends_E)
    d_joint_RG, gated_RF, d_weight_Tk = kernel.gate_backward(joint_RG, weight_Tk, order_R, d_gated_RF)
    del d_gated_RF
    d_gate, d_up, d_down = (weight.new_empty(0) for weight in weights)
    if has_weight_grads:
        (d_down,) = kernel.weight_grad(d_y_RD, gated_RF, ends_E, down.dtype)
    del d_y_RD, gated_RF
    if has_weight_grads:
        d_gate, d_up = kernel.weight_grad(d_joint_RG, kernel.spread(x_TD, place_Tk), ends_E, gate.dtype, parts=2)
    d_x_RD = grouped_matmul(d_joint_RG, kernel.joined(gate, up, num_experts), ends_E)
    return kernel.collect(d_x_RD, place_Tk), d_weight_Tk, d_gate, d_up, d_down


@experts_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    weights: list[Tensor],
    joint: Tensor,
    rows: list[Tensor],
    has_weight_grads: bool,
) -> tuple[Tensor, ...]:
    grads = (torch.empty_like(w) if has_weight_grads else w.new_empty(0) for w in weights)
    return torch.empty_like(x), torch.empty_like(weight), *grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weight, *weights = inputs
    ctx.save_for_backward(x, weight, *weights, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad_TD: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, *weights, joint, order, places, ends = ctx.saved_tensors
    has_weight_grads = any(ctx.needs_input_grad[3:])
    found = experts_backward(grad_TD.contiguous(), x, weight, weights, joint, [order, places, ends], has_weight_grads)
    of_weights = found[2:] if has_weight_grads else (None, None, None)
    return found[0], None, found[1], *of_weights


experts.register_autograd(_differentiate, setup_context=_save)


def sorted_by_expert(expert_Tk: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row of (T, k) at each place, the place of each row, and where the rows of each expert end (int32)."""
    # Keys of two bytes are sorted in two passes, those of eight in eight.
    by_expert_R, order_R = expert_Tk.flatten().to(torch.int16).sort(stable=True)
    every_E = torch.arange(num_experts, dtype=torch.int16, device=expert_Tk.device)
    ends_E = torch.searchsorted(by_expert_R, every_E, right=True, out_int32=True)
    places_R = torch.arange(len(order_R), device=order_R.device)
    return order_R, torch.empty_like(order_R).scatter_(0, order_R, places_R).view_as(expert_Tk), ends_E


def _cast(down: Tensor, num_experts: int) -> Tensor:
    return down.view(num_experts, -1, down.shape[1]).to(torch.bfloat16)
