"""Rotary position embedding: rotate pairs of features of queries and keys by the angle of their position.

One product yields queries, keys and values in one joint tensor, and attention needs each by itself. Rotation and split
are one pass here, and so are, in the backward, the inverse rotation and the join. On a GPU each is one kernel, opaque
for a compiler, which made three of its own.

Shapes: B batch, T tokens, N heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from shoal.comm.autograd_function import as_output, differentiable_once


def rotated(x_BTNH: Tensor, cos_BTH: Tensor, sin_BTH: Tensor) -> Tensor:
    """Rotate each pair (i, i + H/2) of every head by its angle, in the precision of the angles."""
    cos, sin = cos_BTH[:, :, None], sin_BTH[:, :, None]
    first, second = x_BTNH.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BTNH.dtype)


def rotate_heads(
    joint: Tensor, cos_BTH: Tensor, sin_BTH: Tensor, *, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Split (B, T, (N + 2K) H) into q_BTNH and k_BTKH, rotated, and v_BTKH. Each has its own memory, so that saving one
    does not keep the others alive."""
    found: tuple[Tensor, Tensor, Tensor] = _RotateHeads.apply(joint, cos_BTH, sin_BTH, num_heads, num_kv_heads)  # type: ignore[no-untyped-call]
    return found


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> Any:
        ctx.save_for_backward(cos, sin)
        if _has_kernel(joint, cos):
            return tuple(torch.ops.shoal.rotate_heads(joint, cos, sin, num_heads, num_kv_heads))
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
    "shoal::rotate_heads", "(Tensor joint, Tensor cos, Tensor sin, int num_heads, int num_kv_heads) -> Tensor[]"
)
library.define("shoal::join_heads", "(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor")


@library.impl("shoal::rotate_heads", "CUDA")
def _turn(joint: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    from shoal.numerics.kernels.rotary import rotate  # Triton, which CPUs do not have

    parts = _parts(joint, num_heads, num_kv_heads)
    rotate(joint.contiguous(), parts, cos, sin)
    return parts


@library.impl("shoal::join_heads", "CUDA")
def _join(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from shoal.numerics.kernels.rotary import rotate_back

    joint: Tensor = _joint(dq, dk, dv, cos, sin)
    rotate_back([x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv)], joint, cos, sin)
    return joint


@library.register_fake("shoal::rotate_heads")  # type: ignore[untyped-decorator]
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
