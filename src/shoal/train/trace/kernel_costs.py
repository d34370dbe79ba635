"""FLOPs and saved bytes of kernels for which torch reports wrong or no numbers without memory.

torch counts the FLOPs of causal attention without the mask, has no FLOPs for the CPU's attention and LSTM, and reports
the LSTM's workspace, most of the bytes that it saves for the backward, as empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

Shape = Sequence[int]

LSTM_SAMPLE = 1024
"""Tokens with which the workspace of the CPU's LSTM is measured."""

aten = torch.ops.aten
LSTM = aten.mkldnn_rnn_layer.default
"""The kernel of one layer of an LSTM on the CPU."""

WITHOUT_KERNEL = {
    *(aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided),
    aten._unsafe_view,
}
"""Operations that only allocate a tensor, or view one."""

CAUSAL_AT: Mapping[Any, int] = {
    aten._scaled_dot_product_flash_attention_for_cpu: 4,
    aten._scaled_dot_product_flash_attention: 4,
    aten._scaled_dot_product_efficient_attention: 6,
    aten._scaled_dot_product_cudnn_attention: 6,
}
"""A kernel of attention → the position of its argument `is_causal`."""


def launches(func: Any) -> bool:
    """Whether an operation launches a kernel: views, allocations and queries do not."""
    return not func.is_view and func.namespace != "prim" and func.overloadpacket not in WITHOUT_KERNEL


def _attention_flops(causal_at: int) -> Callable[..., float]:
    """torch counts the whole square; a causal kernel computes half of it."""

    def count(query: Shape, key: Shape, value: Shape, *rest: Any, **options: Any) -> float:
        is_causal = len(rest) > causal_at - 3 and rest[causal_at - 3] is True
        return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1]) * (0.5 if is_causal else 1.0)

    return count


def _lstm_flops(x: Shape, from_input: Shape, from_state: Shape, *rest: Any, **options: Any) -> int:
    """Every token is multiplied with the weights of its layer, and so is the state before it."""
    return 2 * prod(x[:-1]) * (prod(from_input) + prod(from_state))


FLOPS: Mapping[Any, Callable[..., float]] = {op: _attention_flops(place) for op, place in CAUSAL_AT.items()} | {
    aten.mkldnn_rnn_layer: _lstm_flops
}


def lstm_workspace(args: tuple[Any, ...]) -> int:
    """Bytes that the CPU's LSTM saves beside its outputs, for which torch reports none without memory.

    Only the library knows the size, so it is run with some of the tokens. The size is proportional to their number.
    """
    if not args[15]:  # it is not trained
        return 0
    length, batch, width = args[0].shape
    some = min(batch, 32)
    few = min(length, max(1, LSTM_SAMPLE // some))
    measured = _measure_workspace(few, some, width, args[10], args[12], args[0].dtype)
    return int(measured * (length * batch) / (few * some))


@lru_cache(maxsize=64)
def _measure_workspace(length: int, batch: int, width: int, hidden: int, has_biases: bool, dtype: torch.dtype) -> int:
    lstm, is_reverse, is_training = 2, False, True
    with unset_fake_temporarily(), torch.device("cpu"):
        weights = torch.zeros(4 * hidden, width), torch.zeros(4 * hidden, hidden), *torch.zeros(2, 4 * hidden)
        tensors = torch.zeros(length, batch, width), *weights, *torch.zeros(2, 1, batch, hidden)
        rest: Any = is_reverse, [], lstm, hidden, 1, has_biases, False, False, is_training
        try:
            *_, workspace = LSTM(*(tensor.to(dtype) for tensor in tensors), *rest)
        except RuntimeError:  # this CPU cannot; those that can keep less than in float32
            *_, workspace = LSTM(*tensors, *rest)
    return int(workspace.nbytes)
