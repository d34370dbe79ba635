"""The order in which a model of transformers runs its modules: what is before its blocks, the blocks, what is after.

Most language models declare it (`pp_plan`). Of others, a copy without memory is run once. A model of several inputs, or
whose modules run both before and after the blocks, has no such order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoal.models.huggingface import experts
from shoal.models.huggingface.modules import blocks_without_plan
from shoal.parallel.pipeline.skeleton import skeleton_of


@dataclass(frozen=True)
class Order:
    """Names of submodules in the order of the forward. Together they hold every parameter, or there is no order."""

    before: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


_known: WeakKeyDictionary[nn.Module, Order] = WeakKeyDictionary()


def order_of(model: Any) -> Order:
    """The order of a model; without any names, if it has none."""
    if model not in _known:
        declared = _declared(model)
        _known[model] = declared if _is_whole(model, declared) else _observed(model)
    return _known[model]


def _is_whole(model: nn.Module, order: Order) -> bool:
    parts = (*order.before, *order.blocks, *order.after)
    is_held = all(any(name.startswith(f"{part}.") for part in parts) for name, _ in model.named_parameters())
    return is_held and bool(order.blocks and order.before)


def _declared(model: Any) -> Order:
    modules = dict(model.named_modules())
    plan = {name: ways for name, ways in (getattr(model, "pp_plan", None) or {}).items() if name in modules}
    lists = [name for name in plan if isinstance(modules[name], nn.ModuleList)]
    if len(lists) != 1:
        return Order()
    blocks = tuple(f"{lists[0]}.{number}" for number in range(len(modules[lists[0]])))
    first = [name for name, (takes, _) in plan.items() if {"input_ids", "inputs_embeds"} & set(takes)]
    after = [name for name in modules if name in plan and name not in (*first, *lists)]  # a plan begins with the head
    return Order(tuple(first), blocks, tuple(after))


def _observed(model: Any) -> Order:
    blocks, inputs = tuple(blocks_without_plan(model)), inputs_of(model)
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(lists) != 1 or inputs is None:
        return Order()
    skeleton = skeleton_of(model)
    seen: list[str] = []
    around = [name for name, _ in model.named_modules() if any(block.startswith(f"{name}.") for block in blocks)]
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
        for name, module in skeleton.named_modules()
        if name and name not in around and _is_outermost(name, around)
    ]
    try:
        experts.install(skeleton)  # transformers' own function reads values
        with torch.device("meta"):
            skeleton(**inputs)
    except Exception:  # it needs other inputs, or real values
        return Order()
    finally:
        for hook in hooks:
            hook.remove()
    return _sorted(model, blocks, seen, [*around, ""])


def _is_outermost(name: str, around: list[str]) -> bool:
    """Whether the modules around it are just those that hold blocks."""
    return name.rpartition(".")[0] in (*around, "")


def _sorted(model: nn.Module, blocks: tuple[str, ...], seen: list[str], around: list[str]) -> Order:
    runs = [name for name in seen if name in blocks]
    if runs != list(blocks):
        return Order()
    start, stop = seen.index(blocks[0]), len(seen) - 1 - seen[::-1].index(blocks[-1])
    outside = [name for name, module in model.named_modules() if name and _is_outermost(name, around)]
    held = [
        name
        for name in outside
        if name not in (*around, *blocks) and next(model.get_submodule(name).parameters(), None) is not None
    ]
    before = [name for name in dict.fromkeys(seen[:start]) if name in held]
    called = [name for name in dict.fromkeys(seen[stop + 1 :]) if name in held]
    after = [*called, *(name for name in held if name not in (*before, *called))]  # some are not called
    between = set(seen[start:stop]) - set(blocks)
    order = Order(tuple(before), blocks, tuple(after))
    return order if not between & set(held) and not set(before) & set(called) and _is_whole(model, order) else Order()


def inputs_of(model: Any) -> Mapping[str, Tensor] | None:
    """The smallest input on the meta device; None: the model takes other things than tokens or images."""
    config, name = model.config, model.main_input_name
    if getattr(config, "is_encoder_decoder", False):
        return None
    if name == "input_ids":
        return {name: torch.zeros(1, 4, dtype=torch.int64, device="meta")}
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if name == "pixel_values" and isinstance(size, int) and isinstance(channels, int):
        return {name: torch.zeros(1, channels, size, size, device="meta")}
    return None
