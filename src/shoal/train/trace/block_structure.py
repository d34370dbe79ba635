"""Which submodules of a model are its blocks, by its structure alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

LISTS = nn.ModuleList | nn.Sequential | nn.ModuleDict


def found_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Name → submodule: the elements of lists of similar modules, and the modules beside such lists."""
    return dict(_found("", model))


def _found(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    children = [(f"{name}.{own}" if name else own, child) for own, child in module.named_children()]
    is_list = isinstance(module, LISTS)
    if is_list and _are_alike(module):
        yield from children
    elif children and (is_list or not name or _holds_likes(module)):
        for child in children:
            yield from _found(*child)
    elif name:
        yield name, module


def _holds_likes(module: nn.Module) -> bool:
    return any(isinstance(each, LISTS) and _are_alike(each) for each in module.modules())


def _are_alike(modules: nn.Module) -> bool:
    """Whether a list repeats a module with submodules: blocks, and neither single layers nor lists of them."""
    composed = [child for child in modules.children() if next(child.children(), None) is not None]
    kinds = Counter(type(child) for child in composed if not (isinstance(child, LISTS) and _holds_likes(child)))
    return any(number > 1 for number in kinds.values())
