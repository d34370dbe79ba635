"""Attention on one device, by the fastest kernel that takes the call."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.errors import ShoalError, to_install
from shoal.numerics.ops.attention import PLAIN, AttentionRule, for_every_head, written_out
from shoal.numerics.ops.flash_attention_4 import attended_by_flash_attention_4, has_flash_attention_4
from shoal.numerics.ops.window_attention import attended_in_window, has_window_kernel

Backend = Literal["auto", "fa4", "cudnn", "flash", "efficient", "math"]
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""The fastest of torch first, of those that take a given shape. On an H200, cuDNN takes 0.64 of the time of flash
attention. FlashAttention 4, where it is installed, takes 0.81 to 0.92 of cuDNN's time."""
BACKENDS: Mapping[Backend, list[SDPBackend]] = {
    "auto": _FASTEST_FIRST,
    **dict(zip(("cudnn", "flash", "efficient", "math"), ([one] for one in _FASTEST_FIRST), strict=True)),
}


def attended(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool,
    backend: Backend = "auto",
    rule: AttentionRule = PLAIN,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with every query head to the key/value head that it shares."""
    rule = rule.within(k_BKSH.shape[2])
    if mask is None and backend in ("auto", "fa4") and has_flash_attention_4(q_BNTH, k_BKSH, v_BKSH, rule):
        return attended_by_flash_attention_4(q_BNTH, k_BKSH, v_BKSH, rule, sinks, causal=causal)
    if backend == "fa4" and q_BNTH.is_cuda:
        raise _no_flash_attention_4(q_BNTH, mask)
    is_plain = causal and mask is None and sinks is None and backend in ("auto", "flash")
    if is_plain and has_window_kernel(q_BNTH, k_BKSH.shape[2], rule):
        return attended_in_window(q_BNTH, k_BKSH, v_BKSH, rule)
    mask_B1TS = seen_keys(mask, q_BNTH.shape[2], k_BKSH.shape[2], q_BNTH.device, causal=causal, window=rule.window)
    if rule.softcap is not None or sinks is not None:
        if mask_B1TS is None and causal:
            mask_B1TS = _places_seen(q_BNTH.shape[2], k_BKSH.shape[2], q_BNTH.device, None, causal=True)
        return written_out(q_BNTH, k_BKSH, v_BKSH, mask_B1TS, rule, sinks)
    if q_BNTH.is_cuda and q_BNTH.dtype == torch.float32:
        # torch's float32 kernel for CUDA has no shared heads; torch would fall back to all T x T scores in memory.
        k_BKSH, v_BKSH = (for_every_head(x, q_BNTH.shape[1]) for x in (k_BKSH, v_BKSH))
    call = partial(
        F.scaled_dot_product_attention,
        attn_mask=mask_B1TS,
        dropout_p=rule.dropout,
        is_causal=causal and mask_B1TS is None,
        scale=rule.scale,
        enable_gqa=True,
    )
    is_half = q_BNTH.dtype in (torch.bfloat16, torch.float16)
    if not q_BNTH.is_cuda or (backend == "auto" and not (is_half and mask_B1TS is None)):
        return call(q_BNTH, k_BKSH, v_BKSH)
    with sdpa_kernel(BACKENDS[backend], set_priority=True):
        return call(q_BNTH, k_BKSH, v_BKSH)


def _no_flash_attention_4(q_BNTH: Tensor, mask: Tensor | None) -> ShoalError:
    size, dtype = q_BNTH.shape[-1], str(q_BNTH.dtype).removeprefix("torch.")
    return ShoalError(
        "FlashAttention 4 must be installed and take every call of attention, got"
        f" heads of {size} in {dtype} {'without' if mask is None else 'with'} a mask",
        fix=f"{to_install('fa4')} on a Hopper GPU, or --run.attention auto",
        code="M081",
    )


def seen_keys(
    mask: Tensor | None, num_queries: int, num_keys: int, device: torch.device, *, causal: bool, window: int | None
) -> Tensor | None:
    """The mask of all heads, (B or 1, 1, T, S); None: all keys, or all that are not later. The queries are the last
    tokens, if there are more keys, as of a cache."""
    is_of_keys = mask is not None and mask.dim() == 2 and mask.dtype == torch.bool
    if mask is not None and not is_of_keys:
        return (
            mask[:, None]
            if window is None
            else _with_window(mask, _places_seen(num_queries, num_keys, device, window, causal=causal))
        )
    seen = None
    if window is not None or (causal and (is_of_keys or num_queries != num_keys)):
        seen = _places_seen(num_queries, num_keys, device, window, causal=causal)
    if mask is None:
        return seen
    keys_B11S = mask[:, None, None, :]
    return keys_B11S.expand(-1, 1, num_queries, -1) if seen is None else seen & keys_B11S


def _with_window(mask_BTS: Tensor, places_11TS: Tensor) -> Tensor:
    if mask_BTS.dtype == torch.bool:
        return mask_BTS[:, None] & places_11TS
    return mask_BTS[:, None].masked_fill(~places_11TS, float("-inf"))


def _places_seen(num_queries: int, num_keys: int, device: torch.device, window: int | None, *, causal: bool) -> Tensor:
    """(1, 1, T, S): keys that are not later, if causal, and of a window."""
    of_queries = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    before_TS = of_queries - torch.arange(num_keys, device=device)
    seen_TS = before_TS >= 0 if causal else torch.ones_like(before_TS, dtype=torch.bool)
    return (seen_TS if window is None else seen_TS & (before_TS.abs() < window))[None, None]
