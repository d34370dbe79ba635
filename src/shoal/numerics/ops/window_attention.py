"""Attention to the last keys alone, in the time of those. torch's flash attention has a window, and its public function
has not: there, a mask of all tokens by all tokens takes its place, and every score is computed.

The name below is private to torch, and only this file uses it. A test compares it with a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.numerics.ops.attention import AttentionRule


def has_window_kernel(q_BNTH: Tensor, num_keys: int, rule: AttentionRule) -> bool:
    """Whether flash attention can leave out the keys before a window, instead of masking them."""
    is_half = q_BNTH.is_cuda and q_BNTH.dtype in (torch.bfloat16, torch.float16)
    is_fit = q_BNTH.shape[-1] % 8 == 0 and q_BNTH.shape[-1] <= 256 and q_BNTH.shape[2] == num_keys
    return is_half and is_fit and rule.window is not None and rule.softcap is None and not rule.dropout


def attended_in_window(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, rule: AttentionRule) -> Tensor:
    """Attend to the own key and those before it in the window: (B, N, T, H) → (B, N, T, H)."""
    assert rule.window is not None
    num_tokens = q_BNTH.shape[2]
    readable = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BNTH, k_BKTH, v_BKTH))
    out_BTNH: Tensor = torch.ops.aten._flash_attention_forward(
        *(x.transpose(1, 2) for x in readable),
        *(None, None, num_tokens, num_tokens, 0.0, True, False),  # samples of one length, no dropout, causal
        scale=rule.scale_for(q_BNTH),
        window_size_left=rule.window - 1,
        window_size_right=0,
    )[0]
    return out_BTNH.transpose(1, 2)
