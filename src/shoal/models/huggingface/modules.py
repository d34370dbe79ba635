"""Find the modules of a model of transformers by what they have, not by their classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

CONVOLUTIONS = (nn.modules.conv._ConvNd, nn.RNNBase)


def name_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    """The full name of a submodule."""
    return next((name for name, module in model.named_modules() if module is wanted), None)


def pattern_of(name: str) -> str:
    """`layers.3.mlp` → `layers.*.mlp`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that call the attention interface: each has the flag that the interface reads."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "is_causal", None), bool) and next(module.children(), None) is not None
    }


def experts_in(model: nn.Module) -> dict[str, Any]:
    """The modules that call the experts interface."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}


def blocks_without_plan(model: Any) -> Iterator[str]:
    """The elements of all lists of the modules that transformers keeps on one device; of a model that names none, of
    the list with the most parameters."""
    found = list(_elements(model, set(getattr(model, "_no_split_modules", None) or ())))
    yield from found or _elements(model, {_kind_of_longest(model)})


def _elements(model: nn.Module, kinds: set[str]) -> Iterator[str]:
    """The elements of all lists with modules of these classes alone."""
    inside: list[str] = []
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and {type(one).__name__ for one in module} <= kinds
        if is_list and not any(name.startswith(f"{outer}.") for outer in inside):
            inside.append(name)
            yield from (f"{name}.{number}" for number, _ in enumerate(module.children()))


def _kind_of_longest(model: nn.Module) -> str:
    """The class of the modules in the list that has the most parameters, of those whose elements are all alike."""
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len({type(x) for x in one}) == 1]
    longest = max(lists, key=lambda one: sum(p.numel() for p in one.parameters()), default=None)
    return "" if longest is None else type(longest[0]).__name__


def mixes_tokens(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Modules inside blocks that may mix tokens outside of attention: a convolution, or parameters in a module that is
    no linear layer, norm, attention or expert."""
    known = attentions(model)
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            has_own = next(iter(module.parameters(recurse=False)), None) is not None
            if isinstance(module, CONVOLUTIONS) or (has_own and name not in known and not is_pointwise(module)):
                yield name


def is_pointwise(module: nn.Module) -> bool:
    """Whether a module with parameters works on each token alone: a linear layer, a norm, a router or experts."""
    kind = type(module).__name__
    is_linear = isinstance(module, nn.Linear) or kind == "Conv1D"  # transformers' linear layer of GPT-2
    is_norm = "Norm" in kind and not kind.startswith(("BatchNorm", "GroupNorm", "InstanceNorm"))
    return is_linear or is_norm or kind.endswith("Router") or hasattr(module, "_is_expert_parallel")
