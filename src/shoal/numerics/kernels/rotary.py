"""Rotate and split queries, keys and values on a GPU, and the inverse: one program per token, all read once.

102 µs for 32,768 tokens of 48 heads of 64 in bfloat16 on an H200, either way (measured 2026-11-16); the bytes take 94.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

_HEADS = 16
"""Heads that a program handles at a time."""
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _some(  # type: ignore[no-untyped-def]
    joint, own, stride, c, s, count: tl.constexpr, features: tl.constexpr, heads: tl.constexpr,
    is_turned: tl.constexpr, is_back: tl.constexpr,
):  # fmt: skip
    """Rotate heads of one kind of one token: `joint` and `own` say where the first of them begins."""
    half: tl.constexpr = features // 2
    width: tl.constexpr = triton.next_power_of_2(half)
    feature = tl.arange(0, width)[None, :]
    for begin in tl.static_range(0, count, heads):
        head = begin + tl.arange(0, heads)[:, None]
        here = (head < count) & (feature < half)
        beside, alone = joint + head * features + feature, own + head.to(tl.int64) * stride + feature
        source, target = (alone, beside) if is_back else (beside, alone)
        first = tl.load(source, mask=here, other=0.0)
        second = tl.load(source + half, mask=here, other=0.0)
        if is_turned:
            a, b = first.to(tl.float32), second.to(tl.float32)
            first = (a * c - b * s).to(target.dtype.element_ty)
            second = (b * c + a * s).to(target.dtype.element_ty)
        tl.store(target, first, mask=here)
        tl.store(target + half, second, mask=here)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _token(  # type: ignore[no-untyped-def]
    joint, q, k, v, cos, sin, num_tokens, width, batch_of_angles,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    num_heads: tl.constexpr, num_kv_heads: tl.constexpr, features: tl.constexpr,
    is_back: tl.constexpr, heads: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    sample, token = place // num_tokens, place % num_tokens
    half: tl.constexpr = features // 2
    angle = tl.arange(0, triton.next_power_of_2(half))[None, :]
    at = sample * batch_of_angles + token * half + angle
    c = tl.load(cos + at, mask=angle < half, other=0.0)
    s = tl.load(sin + at, mask=angle < half, other=0.0)
    if is_back:
        s = -s
    joint += place * width
    _some(joint, q + sample * q_batch + token * q_token, q_head, c, s, num_heads, features, heads, True, is_back)
    joint += num_heads * features
    _some(joint, k + sample * k_batch + token * k_token, k_head, c, s, num_kv_heads, features, heads, True, is_back)
    joint += num_kv_heads * features
    _some(joint, v + sample * v_batch + token * v_token, v_head, c, s, num_kv_heads, features, heads, False, is_back)


def rotate(joint: Tensor, parts: Sequence[Tensor], cos: Tensor, sin: Tensor) -> None:
    """Fill the parts, (B, T, heads, H), from the joint tensor, (B, T, features of all)."""
    _launch(joint, parts, cos, sin, is_back=False)


def rotate_back(parts: Sequence[Tensor], joint: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Fill the joint tensor from the parts."""
    _launch(joint, parts, cos, sin, is_back=True)


def _launch(joint: Tensor, parts: Sequence[Tensor], cos: Tensor, sin: Tensor, *, is_back: bool) -> None:
    q, k, v = parts
    batch, tokens, num_heads, features = q.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    launch: Any = _token[(batch * tokens,)]
    launch(
        joint, q, k, v, cos, sin, tokens, joint.shape[-1], 0 if cos.shape[0] == 1 else cos.stride(0),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        num_heads=num_heads, num_kv_heads=k.shape[2], features=features,
        is_back=is_back, heads=_HEADS, num_warps=_WARPS,
    )  # fmt: skip
