"""Rotary positions: pairs of features of queries and keys, turned by the angle of their position.

Queries, keys and values that come out of one product lie side by side, and attention wants each by itself. Turning,
parting and, in the backward, turning back and joining are each one pass over them here: one kernel on a GPU, which a
compiler leaves alone, where it made three of its own.

Shapes: B batch, T tokens, N heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from shoal.comm.autograd_function import as_output, differentiable_once


def rotated(x_BTNH: Tensor, cos_BTH: Tensor, sin_BTH: Tensor) -> Tensor:
    """Each pair (i, i + H/2) of every head turned by its angle, computed in the precision of the angles."""
    cos, sin = cos_BTH[:, :, None], sin_BTH[:, :, None]
    first, second = x_BTNH.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTNH.dtype)


def rotate_heads(
    joint: Tensor, cos_BTH: Tensor, sin_BTH: Tensor, *, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, (N + 2K) H) → q_BTNH and k_BTKH, turned, and v_BTKH; each in memory of its own, so that what is kept of
    one keeps none of the others."""
    found: tuple[Tensor, Tensor, Tensor] = _TurnedHeads.apply(joint, cos_BTH, sin_BTH, num_heads, num_kv_heads)  # type: ignore[no-untyped-call]
    return found


class _TurnedHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> Any:
        ctx.save_for_backward(cos, sin)
        if _has_kernel(joint, cos):
            return tuple(torch.ops.shoal.turn_heads(joint, cos, sin, num_heads, num_kv_heads))
        q, k, v = joint.unflatten(-1, (num_heads + 2 * num_kv_heads, -1)).split([num_heads, *[num_kv_heads] * 2], dim=2)
        return tuple(as_output(x) for x in (rotated(q, cos, sin), rotated(k, cos, sin), v.contiguous()))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        cos, sin = ctx.saved_tensors
        dq, dk, dv = grads
        if _has_kernel(dq, cos):
            joint = torch.ops.shoal.join_heads(dq, dk, dv, cos, sin)
        else:
            joint = torch.cat([rotated(dq, cos, -sin), rotated(dk, cos, -sin), dv], dim=2).flatten(2)
        return joint, None, None, None, None


def _has_kernel(x: Tensor, cos: Tensor) -> bool:
    return x.is_cuda and cos.dtype == torch.float32


library.define(
    "shoal::turn_heads", "(Tensor joint, Tensor cos, Tensor sin, int num_heads, int num_kv_heads) -> Tensor[]"
)
library.define("shoal::join_heads", "(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor")


@library.impl("shoal::turn_heads", "CUDA")
def _turn(joint: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    from shoal.numerics.kernels.rotary import turn  # Triton, which CPUs do not have

    parts = _parts(joint, num_heads, num_kv_heads)
    turn(joint.contiguous(), parts, cos, sin)
    return parts


@library.impl("shoal::join_heads", "CUDA")
def _join(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from shoal.numerics.kernels.rotary import turn_back

    joint: Tensor = _joint(dq, dk, dv, cos, sin)
    turn_back([x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv)], joint, cos, sin)
    return joint


@library.register_fake("shoal::turn_heads")  # type: ignore[untyped-decorator]
def _parted(joint: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    return _parts(joint, num_heads, num_kv_heads)


@library.register_fake("shoal::join_heads")  # type: ignore[untyped-decorator]
def _joint(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    batch, tokens, num_heads, head_dim = dq.shape
    width = (num_heads + 2 * dk.shape[2]) * head_dim
    return torch.empty((batch, tokens, width), dtype=dq.dtype, device=dq.device)


def _parts(joint: Tensor, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    batch, tokens, width = joint.shape
    head_dim = width // (num_heads + 2 * num_kv_heads)
    return [
        torch.empty((batch, tokens, heads, head_dim), dtype=joint.dtype, device=joint.device)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]
