"""A whole module that mixes tokens, between modules that see a part of them each.

    x/2 ─[gather]─ x ── attention, the same on every rank ── y ─[my part]─ y/2

The backward sums the ranks' gradients of x, each of which is that of its own tokens of y. Gradients of the module's
weights are partial for the same reason.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.collectives import my_part
from shoal.comm.differentiable_collectives import TOKENS, gather_tokens
from shoal.numerics.precision import in_autocast_dtype


def gather_around(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let a module see all tokens: its first argument or `hidden_states` is gathered, its first output divided."""

    def before(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if arguments and isinstance(arguments[0], Tensor):
            return (gather_tokens(in_autocast_dtype(arguments[0]), group), *arguments[1:]), options
        whole = gather_tokens(in_autocast_dtype(options["hidden_states"]), group)
        return arguments, {**options, "hidden_states": whole}

    def after(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return my_part(output[0], TOKENS, group), *output[1:]
        return my_part(output, TOKENS, group)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
