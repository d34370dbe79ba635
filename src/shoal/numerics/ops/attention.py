"""Attention to a part of the keys, which can be merged with attention to other keys.

torch's `scaled_dot_product_attention` returns the output alone. Attention to a part of the keys also needs the
logarithm of the sum of the exponentials (*lse*). It weights the parts when they are merged, and the backward of a part
needs the lse of all keys:

    out = Σ_parts  out_p · exp(lse_p - lse)          lse = log Σ_parts exp(lse_p)

torch's kernels compute the lse but do not return it in the public API: the names below are private to torch. Only this
file uses them, and a test compares each with attention written out in full.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.numerics.precision import wide

_aten = torch.ops.aten
_LSE_ROWS = 32
"""The kernel for masks on CUDA pads the lse to a multiple of this many queries."""
_BIAS_COLUMNS = 16
"""It needs masks whose rows begin at a multiple of this many columns."""


class AttentionOutput(NamedTuple):
    """Attention of some queries to some keys."""

    out: Tensor
    """(B, N, T, H)"""
    lse: Tensor
    """(B, N, T), in at least float32"""


class _Now(threading.local):
    is_part = False


_now = _Now()


def is_part_of_attention() -> bool:
    """Whether this thread is computing attention to a part of the keys. Such a result is not final, so activation
    checkpointing should not save it."""
    return _now.is_part


@torch.no_grad()
def attend(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None = None, *, is_causal: bool = False
) -> AttentionOutput:
    """Attend to keys, each shared by N/K query heads. `mask` (B or 1, 1, T, S) is true where a query may look."""
    _now.is_part = True
    try:
        return _attend(_readable(q_BNTH), _readable(k_BKSH), _readable(v_BKSH), mask, is_causal=is_causal)
    finally:
        _now.is_part = False


def _attend(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None, *, is_causal: bool) -> AttentionOutput:
    bias = None if mask is None else additive(mask, q_BNTH.dtype)
    kernel = _kernel(q_BNTH, bias)
    if kernel == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNTH, k_BKSH, v_BKSH, 0.0, is_causal, attn_mask=bias
        )
        return AttentionOutput(out, lse)
    if kernel == "flash":
        results = _aten._scaled_dot_product_flash_attention(q_BNTH, k_BKSH, v_BKSH, 0.0, is_causal)
        return AttentionOutput(results[0], results[1])
    k, v = (for_every_head(x, q_BNTH.shape[1]) for x in (k_BKSH, v_BKSH))
    if kernel == "efficient":
        shape = (*q_BNTH.shape[:3], k.shape[2])
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q_BNTH, k, v, _aligned(bias, shape), True, 0.0, is_causal
        )
        return AttentionOutput(out, lse[..., : q_BNTH.shape[2]])
    scores = _scores(q_BNTH, k, bias, is_causal)
    return AttentionOutput((scores.softmax(-1) @ v.to(scores.dtype)).to(q_BNTH.dtype), scores.logsumexp(-1))


@torch.no_grad()
def attend_backward(
    grad_BNTH: Tensor,
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    attended: AttentionOutput,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from these keys; `attended` is the result for all keys."""
    grad_BNTH, q_BNTH, k_BKSH, v_BKSH = map(_readable, (grad_BNTH, q_BNTH, k_BKSH, v_BKSH))
    bias = None if mask is None else additive(mask, q_BNTH.dtype)
    kernel = _kernel(q_BNTH, bias)
    out, lse = attended
    if kernel == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad_BNTH, q_BNTH, k_BKSH, v_BKSH, out, lse, 0.0, is_causal, attn_mask=bias
        )
    if kernel == "flash":
        num_queries, num_keys = q_BNTH.shape[2], k_BKSH.shape[2]
        seed = torch.empty(2, dtype=torch.uint64, device=q_BNTH.device)  # of dropout, which is off
        return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            *(grad_BNTH, q_BNTH, k_BKSH, v_BKSH, out, lse.contiguous()),
            *(None, None, num_queries, num_keys, 0.0, is_causal, seed, seed),  # None: sequences are of one length
        )
    num_heads, num_kv_heads = q_BNTH.shape[1], k_BKSH.shape[1]
    k, v = (for_every_head(x, num_heads) for x in (k_BKSH, v_BKSH))
    if kernel == "efficient":
        missing = -lse.shape[-1] % _LSE_ROWS
        seed = torch.zeros((), dtype=torch.int64, device=q_BNTH.device)
        shape = (*q_BNTH.shape[:3], k.shape[2])
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            *(grad_BNTH, q_BNTH, k, v, _aligned(bias, shape), out),
            *(F.pad(lse, (0, missing), value=float("inf")), seed, seed, 0.0, [True, True, True, False], is_causal),
        )
    else:
        dq, dk, dv = _explicit_backward(grad_BNTH, q_BNTH, k, v, attended, _scores(q_BNTH, k, bias, is_causal))
    return dq, _summed(dk, num_kv_heads), _summed(dv, num_kv_heads)


@torch.no_grad()
def merge_(total: AttentionOutput, part: AttentionOutput) -> None:
    """Merge attention to more keys into the total, in place."""
    lse = torch.logaddexp(total.lse, part.lse)
    total.out.mul_((total.lse - lse).exp_()[..., None])
    total.out.addcmul_(part.out.to(total.out.dtype), (part.lse - lse).exp_()[..., None])
    total.lse.copy_(lse)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a query may look, and far below every score elsewhere. Minus infinity would give 0/0 for a query
    that may look at none of these keys. With a finite number its result has no weight in a merge."""
    lowest = torch.finfo(dtype).min / 4
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)


def _readable(x: Tensor) -> Tensor:
    """Make a head's features adjacent in memory: kernels need it, and some do not check it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _kernel(q: Tensor, bias: Tensor | None) -> str:
    if q.device.type == "cpu":
        return "cpu"
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    if q.shape[-1] % 8 or q.shape[-1] > 256:  # no kernel takes such heads
        return "explicit"
    if q.is_cuda and is_half and bias is None:
        return "flash"
    return "efficient" if q.is_cuda and (is_half or q.dtype == torch.float32) else "explicit"


def for_every_head(x_BKSH: Tensor, num_heads: int) -> Tensor:
    """Repeat keys or values for each query head, for kernels without shared ones."""
    times = num_heads // x_BKSH.shape[1]
    return x_BKSH if times == 1 else x_BKSH.repeat_interleave(times, dim=1)


def _summed(gradient_BNSH: Tensor, num_kv_heads: int) -> Tensor:
    """Sum over the query heads that share a key head."""
    summed: Tensor = gradient_BNSH.unflatten(1, (num_kv_heads, -1)).sum(2)
    return summed


def _aligned(bias: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Expand to every head, with rows aligned for the kernel."""
    if bias is None:
        return None
    padded = F.pad(bias, (0, -bias.shape[-1] % _BIAS_COLUMNS))
    return padded[..., : bias.shape[-1]].expand(shape)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor:
    dtype = wide(q.dtype)
    scores: Tensor = (q.to(dtype) @ k.to(dtype).transpose(-1, -2)) * q.shape[-1] ** -0.5
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, torch.finfo(dtype).min / 4)
    return scores if bias is None else scores + bias


def _explicit_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: AttentionOutput, scores: Tensor) -> Any:
    """dS = P (dP - Σ dO·O). The keys of other parts enter only through the lse and the output."""
    wide_grad, scale = grad.to(scores.dtype), q.shape[-1] ** -0.5
    weights = (scores - attended.lse[..., None]).exp_()
    dv = weights.transpose(-1, -2) @ wide_grad
    inner = (wide_grad * attended.out).sum(-1, keepdim=True)
    d_scores = weights.mul_(wide_grad @ v.to(scores.dtype).transpose(-1, -2) - inner).mul_(scale)
    dq, dk = d_scores @ k.to(scores.dtype), d_scores.transpose(-1, -2) @ q.to(scores.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
