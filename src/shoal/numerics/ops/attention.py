"""Attention to a part of the keys, which can be merged with attention to other keys.

torch's `scaled_dot_product_attention` returns the output alone. Attention to a part of the keys also needs the
logarithm of the sum of the exponentials (*lse*). It weights the parts when they are merged, and the backward of a part
needs the lse of all keys:

    out = Σ_parts  out_p · exp(lse_p - lse)          lse = log Σ_parts exp(lse_p)

torch's kernels compute the lse but do not return it in the public API: the names below are private to torch. Only this
file and `window_attention` use them, and a test compares each with attention written out in full.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import NamedTuple

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


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How models differ in attention: the score of a key, the keys that a query sees, and dropout."""

    scale: float | None = None
    """Factor of the product of a query and a key; None: 1/√features."""
    softcap: float | None = None
    """Scores s become softcap · tanh(s / softcap). None: they stay."""
    window: int | None = None
    """A query sees the last `window` keys, its own included; if it sees later ones, as many of those. None: all."""
    dropout: float = 0.0
    """The probability with which a weight becomes 0."""

    def scale_for(self, q: Tensor) -> float:
        """The factor for queries with these features."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def within(self, num_keys: int) -> AttentionRule:
        """Return the rule for this number of keys: a window that holds all of them is no window."""
        return replace(self, window=None) if self.window is not None and self.window >= num_keys else self


PLAIN = AttentionRule()


class _Now(threading.local):
    is_part = False


_now = _Now()


def is_part_of_attention() -> bool:
    """Whether this thread is computing attention to a part of the keys. Such a result is not final, so activation
    checkpointing should not save it."""
    return _now.is_part


@torch.no_grad()
def attend(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    rule: AttentionRule = PLAIN,
) -> AttentionOutput:
    """Attend to keys, each shared by N/K query heads. `mask` (B or 1, 1, T, S) is true where a query may look. Of the
    rule, scale and softcap are used: the mask has the window."""
    _now.is_part = True
    try:
        return _attend(_readable(q_BNTH), _readable(k_BKSH), _readable(v_BKSH), mask, is_causal=is_causal, rule=rule)
    finally:
        _now.is_part = False


def _attend(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None, *, is_causal: bool, rule: AttentionRule
) -> AttentionOutput:
    bias = None if mask is None else additive(mask, q_BNTH.dtype)
    kernel, scale = _kernel(q_BNTH, bias, rule), rule.scale_for(q_BNTH)
    if kernel == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNTH, k_BKSH, v_BKSH, 0.0, is_causal, attn_mask=bias, scale=scale
        )
        return AttentionOutput(out, lse)
    if kernel == "flash":
        results = _aten._scaled_dot_product_flash_attention(q_BNTH, k_BKSH, v_BKSH, 0.0, is_causal, scale=scale)
        return AttentionOutput(results[0], results[1])
    k, v = (for_every_head(x, q_BNTH.shape[1]) for x in (k_BKSH, v_BKSH))
    if kernel == "efficient":
        shape = (*q_BNTH.shape[:3], k.shape[2])
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q_BNTH, k, v, _aligned(bias, shape), True, 0.0, is_causal, scale=scale
        )
        return AttentionOutput(out, lse[..., : q_BNTH.shape[2]])
    scores = _masked(capped_scores(q_BNTH, k, rule), bias, is_causal)
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
    rule: AttentionRule = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from these keys; `attended` is the result for all keys."""
    grad_BNTH, q_BNTH, k_BKSH, v_BKSH = map(_readable, (grad_BNTH, q_BNTH, k_BKSH, v_BKSH))
    bias = None if mask is None else additive(mask, q_BNTH.dtype)
    kernel, scale = _kernel(q_BNTH, bias, rule), rule.scale_for(q_BNTH)
    out, lse = attended
    if kernel == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad_BNTH, q_BNTH, k_BKSH, v_BKSH, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    if kernel == "flash":
        num_queries, num_keys = q_BNTH.shape[2], k_BKSH.shape[2]
        seed = torch.empty(2, dtype=torch.uint64, device=q_BNTH.device)  # of dropout, which is off
        return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            *(grad_BNTH, q_BNTH, k_BKSH, v_BKSH, out, lse.contiguous()),
            *(None, None, num_queries, num_keys, 0.0, is_causal, seed, seed),  # None: sequences are of one length
            scale=scale,
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
            scale=scale,
        )
    else:
        capped = capped_scores(q_BNTH, k, rule)
        weights = (_masked(capped, bias, is_causal) - lse[..., None]).exp_()
        slopes = scale if rule.softcap is None else scale * (1 - (capped / rule.softcap) ** 2)
        dq, dk, dv = _explicit_backward(grad_BNTH, q_BNTH, k, v, out, weights, slopes)
    return dq, _summed(dk, num_kv_heads), _summed(dv, num_kv_heads)


@torch.no_grad()
def merge_(total: AttentionOutput, part: AttentionOutput) -> None:
    """Merge attention to more keys into the total, in place."""
    lse = torch.logaddexp(total.lse, part.lse)
    total.out.mul_((total.lse - lse).exp_()[..., None])
    total.out.addcmul_(part.out.to(total.out.dtype), (part.lse - lse).exp_()[..., None])
    total.lse.copy_(lse)


@torch.no_grad()
def blind_(total: AttentionOutput, dtype: torch.dtype) -> None:
    """Let queries that saw no key return 0, in place. With an infinite lse their weights in a backward are 0, too."""
    saw_none = total.lse < torch.finfo(dtype).min / 8  # see `additive`
    total.out.masked_fill_(saw_none[..., None], 0.0)
    total.lse.masked_fill_(saw_none, float("inf"))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 0 where a query may look, and far below every score elsewhere. Minus infinity would give 0/0 for a query
    that may look at none of these keys. With a finite number its result has no weight in a merge."""
    lowest = torch.finfo(dtype).min / 4
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, lowest)


def _readable(x: Tensor) -> Tensor:
    """Make a head's features adjacent in memory: kernels need it, and some do not check it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _kernel(q: Tensor, bias: Tensor | None, rule: AttentionRule) -> str:
    if rule.softcap is not None:
        return "explicit"
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


def capped_scores(q: Tensor, k: Tensor, rule: AttentionRule) -> Tensor:
    """The scores of all keys, before masks, in at least float32."""
    dtype = wide(q.dtype)
    scores: Tensor = (q.to(dtype) @ k.to(dtype).transpose(-1, -2)) * rule.scale_for(q)
    return scores if rule.softcap is None else (scores / rule.softcap).tanh() * rule.softcap


def written_out(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None, rule: AttentionRule, sinks: Tensor | None
) -> Tensor:
    """Attention with all its scores in memory, for what torch's kernels do not have. `mask` (B or 1, 1, T, S) is true
    where a query may look, or is added to scores."""
    k_BNSH, v_BNSH = (for_every_head(x, q_BNTH.shape[1]) for x in (k_BKSH, v_BKSH))
    scores_BNTS = capped_scores(q_BNTH, k_BNSH, rule)
    if mask is not None:
        scores_BNTS = scores_BNTS + (additive(mask, scores_BNTS.dtype) if mask.dtype == torch.bool else mask)
    if sinks is not None:
        column = sinks.to(scores_BNTS.dtype)[None, :, None, None].expand(*scores_BNTS.shape[:3], 1)
        scores_BNTS = torch.cat([scores_BNTS, column], dim=-1)
    weights_BNTS = scores_BNTS.softmax(-1)[..., : k_BNSH.shape[2]]
    if mask is not None and mask.dtype == torch.bool:
        weights_BNTS = weights_BNTS.masked_fill(~mask, 0.0)  # of a query that sees nothing, as torch's kernels do
    weights_BNTS = F.dropout(weights_BNTS, rule.dropout, training=rule.dropout > 0)
    return (weights_BNTS @ v_BNSH.to(weights_BNTS.dtype)).to(q_BNTH.dtype)


def _masked(scores: Tensor, bias: Tensor | None, is_causal: bool) -> Tensor:
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, torch.finfo(scores.dtype).min / 4)
    return scores if bias is None else scores + bias


def _explicit_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, weights: Tensor, slopes: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """dS = P (dP - Σ dO·O). The keys of other parts enter only through the lse, which is in the weights P, and the
    output. `slopes` are the derivatives of scores by the products of queries and keys."""
    wide_grad = grad.to(weights.dtype)
    dv = weights.transpose(-1, -2) @ wide_grad
    inner = (wide_grad * out).sum(-1, keepdim=True)
    d_scores = weights.mul_(wide_grad @ v.to(weights.dtype).transpose(-1, -2) - inner).mul_(slopes)
    dq, dk = d_scores @ k.to(weights.dtype), d_scores.transpose(-1, -2) @ q.to(weights.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
