"""Attention by FlashAttention 4 where it is installed and takes the call: with windows, softcaps and sinks."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.numerics.kernels import flash_attention_4 as kernel
from shoal.numerics.ops.attention import AttentionRule

LARGEST_HEAD = 128
"""Features of a head. Kernels for up to 256 exist, and were not compared with others."""


def has_flash_attention_4(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, rule: AttentionRule) -> bool:
    """Whether the kernels take such a call. They drop no weights, and need halves and heads of a multiple of 8."""
    is_half = q_BNTH.is_cuda and q_BNTH.dtype in (torch.bfloat16, torch.float16)
    sizes = (q_BNTH.shape[-1], v_BKSH.shape[-1])
    is_fit = sizes[0] == sizes[1] and sizes[0] % 8 == 0 and sizes[0] <= LARGEST_HEAD
    is_alike = q_BNTH.dtype == k_BKSH.dtype == v_BKSH.dtype and q_BNTH.shape[2] == k_BKSH.shape[2]
    return is_half and is_fit and is_alike and not rule.dropout and kernel.is_available()


def attended_by_flash_attention_4(
    q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, rule: AttentionRule, sinks: Tensor | None, *, causal: bool
) -> Tensor:
    """Attend with every query head to the key/value head that it shares: (B, N, T, H) → (B, N, T, H)."""
    own = None if sinks is None else sinks.float()
    numbers = kernel.rule_of(scale=rule.scale_for(q_BNTH), softcap=rule.softcap, window=rule.window, causal=causal)
    out_BTNH, _ = kernel.forward(*(x.transpose(1, 2) for x in (q_BNTH, k_BKTH, v_BKTH)), own, numbers)
    out_BNTH: Tensor = out_BTNH.transpose(1, 2)
    return out_BNTH
