"""Attention by FlashAttention 4, a package of CUDA kernels for Hopper and newer GPUs, as operators of torch.

`torch.compile` and activation checkpointing see one operator and its backward. torch can put the same package behind
its own flash attention, for the whole process: then a call that the package rejects, such as one with dropout, is an
error. Here every call is checked first. The two functions of the package are private to it, and torch calls them, too.
Only this file uses them, and a test on a GPU compares them with attention in float64.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGE = "flash_attn.cute.interface"
CAPABILITIES = (9, 10)
"""Major compute capabilities whose kernels have a backward: Hopper and Blackwell. Only Hopper was tried."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def is_available() -> bool:
    """Whether this process has a GPU for the kernels, and the package. The import takes seconds, once."""
    return _is_available()


@cache
def _is_available() -> bool:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in CAPABILITIES:
        return False
    try:
        package = _package()
    except (ImportError, OSError):  # not installed, or for another CUDA
        return False
    return hasattr(package, "_flash_attn_fwd") and hasattr(package, "_flash_attn_bwd")


@cache
def _package() -> Any:
    """Import the package with a cache of compiled kernels on disk, without which each process compiles them again."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(_cache_folder()))
    warnings.filterwarnings("ignore", module="cutlass|flash_attn|quack")  # they deprecate each other's names
    return import_module(PACKAGE)


def _cache_folder() -> Path:
    """A folder of this user alone: the package loads what is in it, and its own default is below /tmp."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "flash_attention_4"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def rule_of(*, scale: float, softcap: float | None, window: int | None, causal: bool) -> list[float]:
    """Pack how to attend into numbers: an operator takes few kinds of arguments. 0: no softcap, no window."""
    return [scale, softcap or 0.0, window or 0, causal]


def _options(rule: Sequence[float]) -> dict[str, Any]:
    """Arguments of both functions. Our window includes a query's own key, and theirs does not."""
    scale, softcap, window, causal = rule
    options: dict[str, Any] = {"softmax_scale": scale, "softcap": softcap, "causal": bool(causal) and not window}
    if window:
        options |= {"window_size_left": int(window) - 1, "window_size_right": 0 if causal else int(window) - 1}
    return options


@torch.library.custom_op("shoal::flash_attention_4", mutates_args=())
def forward(
    q_BTNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, sinks_N: Tensor | None, rule: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Attend: the output (B, T, N, H) and the logarithm of the sum of exponentials (B, N, T)."""
    call = _package()._flash_attn_fwd
    out, lse, *_ = call(q_BTNH, k_BSKH, v_BSKH, learnable_sink=sinks_N, return_lse=True, **_options(rule))
    return out, lse


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, rule: Sequence[float]) -> tuple[Tensor, Tensor]:
    batch, num_tokens, num_heads, _ = q.shape
    lse = q.new_empty(batch, num_heads, num_tokens, dtype=torch.float32)
    return q.new_empty(batch, num_tokens, num_heads, v.shape[-1]), lse


@torch.library.custom_op("shoal::flash_attention_4_backward", mutates_args=())
def backward(
    grad_BTNH: Tensor,
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKH: Tensor,
    out_BTNH: Tensor,
    lse_BNT: Tensor,
    sinks_N: Tensor | None,
    rule: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values and sinks; the last is empty without sinks."""
    dq, dk, dv, *of_sinks = _package()._flash_attn_bwd(
        *(q_BTNH, k_BSKH, v_BSKH, out_BTNH, grad_BTNH, lse_BNT),
        **_options(rule),
        learnable_sink=sinks_N,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dq, dk, dv, of_sinks[0] if of_sinks else lse_BNT.new_empty(0)


@backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, rule: Any) -> Any:
    of_sinks = lse.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), of_sinks


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.rule = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad_BTNH: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    """The lse has no gradient: no caller uses it."""
    q, k, v, sinks, out, lse = ctx.saved_tensors
    dq, dk, dv, dsinks = backward(grad_BTNH, q, k, v, out, lse, sinks, ctx.rule)
    return dq, dk, dv, None if sinks is None else dsinks, None


forward.register_autograd(_differentiate, setup_context=_save)
