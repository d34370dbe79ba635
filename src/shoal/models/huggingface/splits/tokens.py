"""Prove that a block computes each token alone, outside of modules before which `sp` gathers all tokens.

The block is run with all tokens, then with the first ones, then with the others. A region, or an attention that stays
whole, is given all tokens there. Each run must return its part of what all tokens give.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from shoal.blueprint.description import Split
from shoal.models.huggingface.splits.block_copies import BlockCopy
from shoal.models.huggingface.splits.trial import is_close
from shoal.verification.exact_casts import keeping_float64

GATHERED = (Split.REGION, Split.ALL_TOKENS)
TOKENS = -2
"""The dim of tokens in an activation (samples, tokens, features), or (tokens, features)."""


def why_not_divided(block: BlockCopy, splits: Mapping[str, Split]) -> str | None:
    """Why tokens of a block cannot be divided; None: they can. `splits`: those of submodules of the block."""
    arguments = [*block.arguments, *block.options.values()]
    x = block.arguments[0] if block.arguments else block.options.get("hidden_states")
    if not isinstance(x, Tensor) or x.dim() != 3:
        return "do not read activations (samples, tokens, features)"
    if any(isinstance(one, Tensor) and one.requires_grad and one is not x for one in arguments):
        return "read more activations than those of their tokens"
    whole = _Run(splits)
    expected = whole.of(block, x)
    if not isinstance(expected, Tensor) or expected.shape != x.shape:
        return "do not return activations of their tokens"
    middle = x.shape[TOKENS] // 2
    for tokens in (slice(None, middle), slice(middle, None)):
        found = _Run(splits, whole.inputs, tokens).of(block, _some(x, tokens))
        if not isinstance(found, Tensor) or not is_close(found, _some(expected, tokens)):
            return "compute a token from others, outside of the attention interface"
    return None


class _Run:
    """One run of a block. `inputs`: those of its regions in a run with all tokens, of which this one has some."""

    def __init__(
        self, splits: Mapping[str, Split], inputs: Mapping[str, Tensor] | None = None, tokens: slice = slice(None)
    ) -> None:
        self._splits, self._given, self._tokens = splits, inputs, tokens
        self.inputs: dict[str, Tensor] = {}

    def of(self, block: BlockCopy, x: Tensor) -> Any:
        """The first output of the block; None: it cannot be run so."""
        with ExitStack() as stack, torch.no_grad():
            for name, how in self._splits.items():
                module = block.module.get_submodule(name)
                if how in GATHERED:
                    stack.callback(module.register_forward_pre_hook(self._before(name), with_kwargs=True).remove)
                if how in (Split.ROW, Split.ALL_TOKENS):
                    stack.callback(module.register_forward_hook(self._after).remove)
            stack.enter_context(keeping_float64("fp64", is_foreign=True))
            try:
                if block.arguments:
                    output = block.module(x, *block.arguments[1:], **block.options)
                else:
                    output = block.module(**{**block.options, "hidden_states": x})
            except Exception:  # it was made for other numbers of tokens
                return None
        return output if isinstance(output, Tensor) else output[0]

    def _before(self, name: str) -> Any:
        def hook(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            x = arguments[0] if arguments else options["hidden_states"]
            if self._given is None:
                self.inputs[name] = x
                return None
            whole = self._given[name]
            if not is_close(x, _some(whole, self._tokens)):
                raise ValueError(f"{name} reads other tokens")
            return ((whole, *arguments[1:]), options) if arguments else (arguments, {**options, "hidden_states": whole})

        return hook

    def _after(self, _module: nn.Module, _arguments: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return _some(output, self._tokens)
        return _some(output[0], self._tokens), *output[1:]


def _some(x: Tensor, tokens: slice) -> Tensor:
    return x[..., tokens, :]
