"""Prove that a block computes each token alone, outside of modules before which `sp` gathers all tokens.

The block is run with all tokens, then with the first ones, then with the others. A region, or a module that stays whole
and mixes tokens, is given all tokens there. Each run must return its part of what all tokens give. What every rank has
whole, as the output of an encoder, is replaced by nan: it may be read where shoal passes it on alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.blueprint.description import Split
from shoal.models.huggingface.splits.block_copies import BlockCopy
from shoal.models.huggingface.splits.trial import is_close
from shoal.parallel.tensor_parts.arguments import by_name, changed, first_of, names_of
from shoal.verification.exact_casts import keeping_float64

GATHERED = (Split.REGION, Split.ALL_TOKENS)
TOKENS = -2
"""The dim of tokens in an activation (..., samples, tokens, features), or (tokens, features)."""
ACTIVATION = 3
"""The dims of an activation whose samples are one of them."""


@dataclass(frozen=True)
class Division:
    """How the tokens of a block are divided. Names are those of submodules of the block; "" is the block."""

    splits: Mapping[str, Split]
    arguments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """As `Description.sp_arguments`; of a block, those that it has whole are named, too."""


@dataclass
class Recorded:
    """What modules of a block were given, and returned, in a run with all tokens."""

    inputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Module → its arguments by name; "" is the block."""
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    twice: set[str] = field(default_factory=set)

    def first(self, name: str) -> Any:
        """The activations that a module was given."""
        return self.inputs[name].get(self.first_name(name))

    def first_name(self, name: str) -> str:
        """The argument that they are."""
        return first_of(tuple(self.inputs[name]), self.calls[name][0])


def recorded(block: BlockCopy) -> Recorded | None:
    """Run a block with all tokens; None: it cannot be run so."""
    found = Recorded()

    def before(name: str, names: tuple[str, ...]) -> Any:
        def hook(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            found.twice |= {name} & found.calls.keys()
            found.calls[name] = arguments, options
            found.inputs[name] = by_name(names, arguments, options)

        return hook

    def after(name: str) -> Any:
        def hook(_module: nn.Module, _arguments: Any, output: Any) -> None:
            found.outputs[name] = output

        return hook

    with ExitStack() as stack, torch.no_grad():
        for name, module in block.module.named_modules():
            stack.callback(module.register_forward_pre_hook(before(name, names_of(module)), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after(name)).remove)
        stack.enter_context(keeping_float64("fp64", is_foreign=True))
        try:
            block.module(*block.arguments, **block.options)
        except Exception:  # it reads what a trial does not give it
            return None
    return found


def others_of(block: BlockCopy) -> list[str] | None:
    """The arguments of a block, beside its activations, through which gradients leave it. Those that a block before has
    returned come from tokens of the rank. None: some have no name."""
    given = by_name(names_of(block.module), block.arguments, block.options)
    first = first_of(tuple(given), block.arguments)
    found = [name for name, one in given.items() if isinstance(one, Tensor) and one.requires_grad and name != first]
    known = {id(one) for one in given.values()}
    nested = (one for one in torch.utils._pytree.tree_leaves(given) if isinstance(one, Tensor) and one.requires_grad)
    if any(id(one) not in known for one in nested):
        return None
    return [name for name in found if name not in block.relayed]


def why_not_divided(block: BlockCopy, division: Division, whole: Recorded | None = None) -> str | None:
    """Why tokens of a block cannot be divided so; None: they can."""
    whole = whole or recorded(block)
    x = None if whole is None else whole.first("")
    if whole is None or not isinstance(x, Tensor) or x.dim() < ACTIVATION:
        return "do not read activations (samples, tokens, features)"
    others = others_of(block)
    if others is None or set(others) - division.arguments.get("", {}).keys():
        return "read more activations than those of their tokens"
    expected = _returned(whole.outputs[""])
    if not expected or expected[0].shape != x.shape:
        return "do not return activations of their tokens"
    middle = x.shape[TOKENS] // 2
    for tokens in (slice(None, middle), slice(middle, None)):
        found = Part(block, division, whole, tokens).of_block()
        if not found or not is_close(found[0], some(expected[0], tokens)):
            return "compute a token from others, outside of the attention interface"
        if block.relays and not all(map(is_close, found[1:], expected[1:])):
            return "return more of their tokens than activations"
    return None


def _returned(output: Any) -> list[Tensor]:
    given = output if isinstance(output, tuple | list) else (output,)
    is_first = bool(given) and isinstance(given[0], Tensor)
    return [one for one in given if isinstance(one, Tensor) and one.is_floating_point()] if is_first else []


class Part:
    """A run of a block, or of a module in it, with some of its tokens."""

    def __init__(self, block: BlockCopy, division: Division, whole: Recorded, tokens: slice) -> None:
        self._block, self._division, self._whole, self._tokens = block, division, whole, tokens
        self._num_tokens = whole.first("")[..., tokens, :].shape[TOKENS]

    def of_block(self) -> list[Tensor]:
        """What the block returns; nothing: it cannot be run so."""
        new = {self._whole.first_name(""): self._some(self._whole.first(""))}
        for name, way in self._division.arguments.get("", {}).items():
            one = self._whole.inputs[""][name]
            if way == "divide" and (one.dim() < 2 or one.shape[TOKENS] != self._whole.first("").shape[TOKENS]):
                return []
            new[name] = self._some(one) if way == "divide" else torch.full_like(one, torch.nan)
        return self._of("", new)

    def of_module(self, name: str) -> list[Tensor]:
        """What a module returns, of whose arguments all that have the shape of its activations are divided."""
        x, ways = self._whole.first(name), self._division.arguments.get("", {})
        entered = {id(self._whole.inputs[""][one]) for one, way in ways.items() if way == "enter"}
        new = {
            one: self._some(value)
            for one, value in self._whole.inputs[name].items()
            if isinstance(value, Tensor) and value.shape[:-1] == x.shape[:-1] and id(value) not in entered
        }
        return self._of(name, new)

    def _of(self, name: str, new: Mapping[str, Any]) -> list[Tensor]:
        module = self._block.module.get_submodule(name)
        with ExitStack() as stack, torch.no_grad():
            for inner, how in self._division.splits.items():
                layer = self._block.module.get_submodule(inner)
                if how in (*GATHERED, Split.COLUMN):
                    hook = self._before(inner, how, names_of(layer))
                    stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
                if how in (Split.ROW, Split.ALL_TOKENS):
                    stack.callback(layer.register_forward_hook(self._after).remove)
            stack.enter_context(keeping_float64("fp64", is_foreign=True))
            arguments, options = changed(names_of(module), *self._whole.calls[name], new)
            try:
                return _returned(module(*arguments, **options))
            except Exception:  # it was made for other numbers of tokens
                return []

    def _before(self, name: str, how: Split, names: tuple[str, ...]) -> Any:
        ways = self._division.arguments.get(name, {})
        outer = (one for one, split in self._division.splits.items() if split is Split.REGION)
        is_inside = how is Split.COLUMN and any(not one or name.startswith(f"{one}.") for one in outer)

        def hook(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            given, known = by_name(names, arguments, options), self._whole.inputs[name]
            first = first_of(names, arguments)
            wanted = dict(ways) if how is Split.COLUMN else {first: "gather", **ways}
            if how is Split.COLUMN and not wanted and not is_inside:
                wanted = {first: "gather"}
            if how is Split.COLUMN and given[first].dim() < ACTIVATION and wanted.get(first) == "gather":
                return None  # each row is computed alone: ROW finds as many
            for one, way in wanted.items():
                if way == "gather" and not is_close(given[one], self._some(known[one])):
                    raise ValueError(f"{name} reads other tokens")
            return changed(names, arguments, options, {one: known[one] for one in wanted})

        return hook

    def _after(self, _module: nn.Module, _arguments: Any, output: Any) -> Any:
        first = output if isinstance(output, Tensor) else output[0]
        if first.shape[TOKENS] == self._num_tokens:
            return output
        return self._some(first) if isinstance(output, Tensor) else (self._some(first), *output[1:])

    def _some(self, x: Tensor) -> Tensor:
        return some(x, self._tokens)


def some(x: Tensor, tokens: slice) -> Tensor:
    """Some tokens of an activation."""
    return x[..., tokens, :]
