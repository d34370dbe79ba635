"""A whole module that mixes tokens, between modules that see a part of them each.

    x/2 ─[gather]─ x ── attention, the same on every rank ── y ─[my part]─ y/2

The backward sums the ranks' gradients of x, each of which is that of its own tokens of y. Gradients of the module's
weights are partial for the same reason, and those of what every rank has whole, as the output of an encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.collectives import my_part
from shoal.comm.differentiable_collectives import TOKENS, enter, gather_tokens
from shoal.numerics.precision import in_autocast_dtype
from shoal.parallel.tensor_parts.arguments import by_name, changed, first_of, names_of

WAYS = {"gather": gather_tokens, "enter": enter}


def gather_around(module: nn.Module, group: dist.ProcessGroup, ways: Mapping[str, str]) -> None:
    """Let a module see all tokens: its first argument or `hidden_states` is gathered, its first output divided. `ways`:
    what becomes of other arguments, by their names."""
    names = names_of(module)

    def before(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given = by_name(names, arguments, options)
        wanted = {first_of(names, arguments): "gather", **ways}
        new = {
            name: WAYS[way](in_autocast_dtype(given[name]), group)
            for name, way in wanted.items()
            if isinstance(given.get(name), Tensor)
        }
        return changed(names, arguments, options, new)

    def after(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return my_part(output[0], TOKENS, group), *output[1:]
        return my_part(output, TOKENS, group)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
