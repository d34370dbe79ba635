"""Tokens that are divided between blocks alone: outside of them every rank has all.

    x ─[divide]─ first block ── x/2 ── ... ── last block ─[join]─ x

So code around the blocks, as of positions, a class token or a pooled output, is that of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from shoal.comm.differentiable_collectives import divide_tokens, join_tokens


def divide_between(module: nn.Module, name: str, blocks: Sequence[str], tensor: Any) -> None:
    """Divide the first argument of the first block, or its `hidden_states`, and join the first output of the last."""

    def before(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        x = arguments[0] if arguments else options["hidden_states"]
        tensor.check_divisible(x)
        mine = divide_tokens(x, tensor.group)
        return ((mine, *arguments[1:]), options) if arguments else (arguments, {**options, "hidden_states": mine})

    def after(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return join_tokens(output, tensor.group)
        return join_tokens(output[0], tensor.group), *output[1:]

    if name == blocks[0]:
        module.register_forward_pre_hook(before, with_kwargs=True)
    if name == blocks[-1]:
        module.register_forward_hook(after)
