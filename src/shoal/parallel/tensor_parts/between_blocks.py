"""Tokens that are divided between blocks alone: outside of them every rank has all.

    x ─[divide]─ first block ── x/2 ── ... ── last block ─[join]─ x

So code around the blocks, as of positions, a class token or a pooled output, is that of one device. An encoder and a
decoder are two such chains: the decoder reads all tokens of the encoder, and divides its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shoal.blueprint.description import Description, chains
from shoal.comm.differentiable_collectives import divide_tokens, join_tokens
from shoal.parallel.tensor_parts.arguments import by_name, changed, first_of, names_of


def divide_between(module: nn.Module, name: str, description: Description, tensor: Any) -> None:
    """Divide the first argument of a first block, or its `hidden_states`, and join the first output of a last one.
    Other arguments with a row for each token are divided before every block."""
    found = chains(description.token_blocks)
    is_first, is_last = name in {chain[0] for chain in found}, name in {chain[-1] for chain in found}
    names = names_of(module)
    others = [one for one, way in description.sp_arguments_of(name).items() if way == "divide"]

    def before(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        given, first = by_name(names, arguments, options), first_of(names, arguments)
        if is_first:
            tensor.check_divisible(given[first])
        divided = [first, *others] if is_first else others
        new = {one: divide_tokens(given[one], tensor.group) for one in divided if isinstance(given.get(one), Tensor)}
        return changed(names, arguments, options, new)

    def after(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return join_tokens(output, tensor.group)
        return join_tokens(output[0], tensor.group), *output[1:]

    if is_first or others:
        module.register_forward_pre_hook(before, with_kwargs=True)
    if is_last:
        module.register_forward_hook(after)
