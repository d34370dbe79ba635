"""Experts on a GPU, beside their products: rows of tokens, the gate, and gradients of weights in their own precision.

    spread        each token's row is read once and written to the places of its k experts
    collect       the k rows of a token are read and summed in float32, in their order
    gate          silu(gate) · up · weight of the row, rounded once
    gate_backward all that the backward needs of it: gradients, the gated rows again, and the weight's gradient
    joined        the weights of gate and up side by side, in bfloat16
    weight_grad   dᵀ · x for the rows of each expert, written as the optimizer reads it: torch's grouped product writes
                  bfloat16, which another pass would have to widen

Shapes: T tokens, k experts per token, R = T·k rows sorted by expert, D and F features, G = 2·F, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_COLUMNS = 1024
"""Columns of a row per program, or per turn of its loop."""
_WARPS = 4
_ELEMENTS = 4096
"""Elements of a weight per program."""
_TILE, _DEPTH, _STAGES = (128, 256), 64, 4
"""Rows and columns of a weight's gradient per program, rows of tokens that it multiplies at a time, and how many such
steps it loads ahead. Of six choices the fastest on an H200, of experts of 512 and of 2,048 features."""
_GROUP = 8
"""Tiles above each other that run at the same time: they share columns of x in the cache."""


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _spread(x, places, y, width, top_k: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    here = columns < width
    values = tl.load(x + token * width + columns, mask=here)
    for number in tl.static_range(top_k):
        place = tl.load(places + token * top_k + number)
        tl.store(y + place * width + columns, values, mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _collect(y, places, x, width, top_k: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    here = columns < width
    total = tl.zeros([block], dtype=tl.float32)
    for number in tl.static_range(top_k):
        place = tl.load(places + token * top_k + number)
        total += tl.load(y + place * width + columns, mask=here, other=0.0).to(tl.float32)
    tl.store(x + token * width + columns, total.to(x.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gate(joint, weight, order, gated, width, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    here = columns < width
    share = tl.load(weight + tl.load(order + row)).to(tl.float32)
    gate = tl.load(joint + row * 2 * width + columns, mask=here, other=0.0).to(tl.float32)
    up = tl.load(joint + row * 2 * width + width + columns, mask=here, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up * share
    tl.store(gated + row * width + columns, value.to(gated.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gate_backward(  # type: ignore[no-untyped-def]
    joint, weight, order, d_gated, d_joint, gated, d_weight, width, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    origin = tl.load(order + row)
    share = tl.load(weight + origin).to(tl.float32)
    total = tl.zeros([block], dtype=tl.float32)
    for first in range(0, width, block):
        columns = first + tl.arange(0, block)
        here = columns < width
        place = row * 2 * width + columns  # of the gate; `up` is `width` further on
        gate = tl.load(joint + place, mask=here, other=0.0).to(tl.float32)
        up = tl.load(joint + place + width, mask=here, other=0.0).to(tl.float32)
        d = tl.load(d_gated + row * width + columns, mask=here, other=0.0).to(tl.float32)
        open_part = 1.0 / (1.0 + tl.exp(-gate))
        value = gate * open_part
        total += d * value * up
        slope = open_part + value * (1.0 - open_part)
        tl.store(d_joint + place, (d * share * up * slope).to(d_joint.dtype.element_ty), mask=here)
        tl.store(d_joint + place + width, (d * share * value).to(d_joint.dtype.element_ty), mask=here)
        tl.store(gated + row * width + columns, (value * up * share).to(gated.dtype.element_ty), mask=here)
    tl.store(d_weight + origin, tl.sum(total, axis=0).to(d_weight.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _join(gate, up, joint, size, block: tl.constexpr):  # type: ignore[no-untyped-def]
    expert = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * block + tl.arange(0, block)
    here = places < size
    values = tl.load(gate + expert * size + places, mask=here)
    tl.store(joint + expert * 2 * size + places, values.to(joint.dtype.element_ty), mask=here)
    values = tl.load(up + expert * size + places, mask=here)
    tl.store(joint + (expert * 2 + 1) * size + places, values.to(joint.dtype.element_ty), mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _weight_grad(  # type: ignore[no-untyped-def]
    d, x, ends, first_half, second_half, height, width, split,
    tile_m: tl.constexpr, tile_n: tl.constexpr, depth: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    num_m, num_n = tl.cdiv(height, tile_m), tl.cdiv(width, tile_n)
    top = tl.program_id(0) // (group * num_n) * group
    size = tl.minimum(num_m - top, group)
    m = (top + tl.program_id(0) % (group * num_n) % size) * tile_m
    n = tl.program_id(0) % (group * num_n) // size * tile_n
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    whole = begin + (end - begin) // depth * depth
    total = tl.zeros((tile_m, tile_n), dtype=tl.float32)
    for row in tl.range(begin, whole, depth):
        total = tl.dot(d.load([row, m]).T, x.load([row, n]), total)
    if whole < end:  # the rest of the rows, and some of the next expert, which count as zero
        is_own = whole + tl.arange(0, depth) < end
        # Both: past the last row of an expert there may be NaN, which zero does not cancel.
        left = tl.where(is_own[:, None], d.load([whole, m]), 0.0)
        right = tl.where(is_own[:, None], x.load([whole, n]), 0.0)
        total = tl.dot(left.T, right, total)
    rows, columns = m + tl.arange(0, tile_m), n + tl.arange(0, tile_n)
    value = total.to(first_half.dtype.element_ty)
    own = columns[None, :] < width
    start = expert.to(tl.int64) * split * width
    places = start + rows[:, None] * width + columns[None, :]
    tl.store(first_half + places, value, mask=own & (rows < split)[:, None])
    if split < height:
        below = start + (rows - split)[:, None] * width + columns[None, :]
        tl.store(second_half + below, value, mask=own & (rows >= split)[:, None] & (rows < height)[:, None])


def spread(x_TD: Tensor, place_Tk: Tensor) -> Tensor:
    """Copy each token's row to its places."""
    (num_tokens, top_k), width = place_Tk.shape, x_TD.shape[1]
    y_RD = x_TD.new_empty(num_tokens * top_k, width)
    launch: Any = _spread[(num_tokens, triton.cdiv(width, _COLUMNS))]
    launch(x_TD, place_Tk, y_RD, width, top_k=top_k, block=_COLUMNS, num_warps=_WARPS)
    return y_RD


def collect(y_RD: Tensor, place_Tk: Tensor) -> Tensor:
    """Sum the rows of each token."""
    (num_tokens, top_k), width = place_Tk.shape, y_RD.shape[1]
    x_TD = y_RD.new_empty(num_tokens, width)
    launch: Any = _collect[(num_tokens, triton.cdiv(width, _COLUMNS))]
    launch(y_RD, place_Tk, x_TD, width, top_k=top_k, block=_COLUMNS, num_warps=_WARPS)
    return x_TD


def gate(joint_RG: Tensor, weight_Tk: Tensor, order_R: Tensor) -> Tensor:
    """Return silu(gate) · up · weight, (R, F), of gate and up side by side."""
    num_rows, width = joint_RG.shape[0], joint_RG.shape[1] // 2
    gated_RF = joint_RG.new_empty(num_rows, width)
    launch: Any = _gate[(num_rows, triton.cdiv(width, _COLUMNS))]
    launch(joint_RG, weight_Tk, order_R, gated_RF, width, block=_COLUMNS, num_warps=_WARPS)
    return gated_RF


def gate_backward(
    joint_RG: Tensor, weight_Tk: Tensor, order_R: Tensor, d_gated_RF: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the joint rows, the gated rows again, and the gradient of the weights."""
    d_joint_RG, gated_RF, d_weight_Tk = map(torch.empty_like, (joint_RG, d_gated_RF, weight_Tk))
    block = min(_COLUMNS, triton.next_power_of_2(d_gated_RF.shape[1]))
    launch: Any = _gate_backward[(joint_RG.shape[0],)]
    launch(
        joint_RG, weight_Tk, order_R, d_gated_RF, d_joint_RG, gated_RF, d_weight_Tk, d_gated_RF.shape[1],
        block=block, num_warps=_WARPS,
    )  # fmt: skip
    return d_joint_RG, gated_RF, d_weight_Tk


def joined(gate: Tensor, up: Tensor, num_experts: int) -> Tensor:
    """Cast the weights of gate and up, (E · F, D), into one tensor (E, G, D) in bfloat16."""
    size = gate.numel() // num_experts
    joint_EGD = gate.new_empty(num_experts, 2 * gate.shape[0] // num_experts, gate.shape[1], dtype=torch.bfloat16)
    launch: Any = _join[(triton.cdiv(size, _ELEMENTS), num_experts)]
    launch(gate, up, joint_EGD, size, block=_ELEMENTS, num_warps=_WARPS)
    return joint_EGD


def weight_grad(d_RM: Tensor, x_RN: Tensor, ends_E: Tensor, dtype: torch.dtype, *, parts: int = 1) -> list[Tensor]:
    """Return dᵀ · x over the rows of each expert, (E · M, N): as one matrix, or as two with half the rows each."""
    height, width = d_RM.shape[1], x_RN.shape[1]
    split, num_experts = height // parts, len(ends_E)
    grads = [d_RM.new_empty(num_experts * split, width, dtype=dtype) for _ in range(parts)]
    left, right = ([_DEPTH, size] for size in _TILE)
    tiles = triton.cdiv(height, _TILE[0]) * triton.cdiv(width, _TILE[1])
    launch: Any = _weight_grad[(tiles, num_experts)]
    launch(
        TensorDescriptor.from_tensor(d_RM, left), TensorDescriptor.from_tensor(x_RN, right), ends_E,
        grads[0], grads[-1], height, width, split,
        tile_m=_TILE[0], tile_n=_TILE[1], depth=_DEPTH, group=_GROUP, num_warps=8, num_stages=_STAGES,
    )  # fmt: skip
    return grads
