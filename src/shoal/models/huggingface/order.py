"""The order in which a model of transformers runs its modules: what is before its blocks, the blocks, what is after.

Most language models declare it (`pp_plan`). Of others, a copy without memory is run once. An encoder and a decoder have
one order: the blocks of the first, then those of the second. A model with parameters outside of modules has none.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from shoal.blueprint.description import Description
from shoal.models.huggingface import experts
from shoal.models.huggingface.modules import blocks_without_plan
from shoal.parallel.pipeline.calls import Forward, trace_calls
from shoal.parallel.pipeline.known_values import KnownValues
from shoal.parallel.pipeline.skeleton import skeleton_of


@dataclass(frozen=True)
class Order:
    """Names of submodules in the order of the forward. Together they hold every parameter, or there is no order."""

    before: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    costs: Mapping[str, float] = field(default_factory=dict)
    """FLOPs of each, where they see sequences of different lengths."""
    uncalled: tuple[str, ...] = ()
    """Modules whose parameters others read without calling them: they have no place in the order."""
    is_declared: bool = False
    """Whether the model's class says it."""
    why_not: str | None = None
    """Why stages cannot run it so; None: they can."""


FRAMES = 16
"""The length of a small sound, in steps of the convolutions that read it."""
ANY_SIZE = 64
"""Height and width of an image for a model whose config has none, such as a convolutional one."""
LONGEST_CAUSE = 100
"""Characters of an error of torch that a message repeats."""
_known: WeakKeyDictionary[nn.Module, Order] = WeakKeyDictionary()


def order_of(model: Any) -> Order:
    """The order of a model; without any names, if it has none."""
    if model not in _known:
        declared = _declared(model)
        found = declared if _is_whole(model, declared) else _observed(model)
        if _share(model, found.blocks):
            found = Order(why_not="has blocks that share parameters")
        _known[model] = found if found.blocks else _without_stages(model, found.why_not)
    return _known[model]


def _without_stages(model: Any, why_not: str | None) -> Order:
    """The blocks of a model that cannot be cut between them. Blocks that share parameters are none: a rank that gathers
    one of them would miss what the other holds."""
    blocks = tuple(blocks_without_plan(model))
    return Order(blocks=() if _share(model, blocks) else blocks, why_not=why_not)


def _share(model: nn.Module, blocks: tuple[str, ...]) -> bool:
    owned = [{id(p) for p in model.get_submodule(name).parameters()} for name in blocks]
    return sum(map(len, owned)) > len(set().union(*owned))


def ends(model: Any) -> list[Any]:
    """The embedding of tokens, and the layer of logits, of those that a model has."""
    found = []
    for method in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            found.append(method())
        except NotImplementedError:  # a model of images has none
            continue
    return [one for one in found if one is not None]


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
    return Order(tuple(first), blocks, tuple(after), is_declared=True)


def _observed(model: Any) -> Order:
    """Run a copy without memory, and sort its modules by what they read."""
    blocks, inputs = tuple(blocks_without_plan(model)), inputs_of(model)
    if not blocks:
        return Order(why_not="has no list of modules that are alike")
    if inputs is None:
        return Order(why_not=f"takes {model.main_input_name}, of which shoal does not know the shape")
    beside = tuple(_beside(model, blocks))
    skeleton = skeleton_of(model)
    experts.install(skeleton)  # transformers' own function reads values
    options = dict(inputs) | ({"use_cache": False} if takes(model, "use_cache") else {})
    try:
        with FlopCounterMode(display=False) as counter:
            forward = trace_calls(skeleton, Description(blocks=(*blocks, *beside)), ((), options))
    except Exception as error:  # it needs other inputs, or real values
        return Order(why_not=f"cannot be run without memory ({_first_line(error)})")
    order = _sorted(model, forward, blocks, beside)
    unrun = [name for name in beside if name not in {call.module for call in forward.calls}]
    read = tuple(name for name in unrun if _is_read(skeleton, name, options))
    order = replace(order, after=tuple(name for name in order.after if name not in read), uncalled=read)
    if not order.blocks or not getattr(model.config, "is_encoder_decoder", False):
        return order
    flops = counter.get_flop_counts()
    names = (*order.before, *order.blocks, *order.after)
    root = type(model).__name__
    return replace(order, costs={name: float(sum(flops.get(f"{root}.{name}", {}).values())) for name in names})


def _is_read(skeleton: Any, name: str, options: Mapping[str, Any]) -> bool:
    """Whether a model cannot run without the parameters of a module that it does not call."""
    module = skeleton.get_submodule(name)
    before = [(one, dict(one._parameters)) for one in module.modules()]
    known = KnownValues()
    try:
        for one, own in before:
            one._parameters = dict.fromkeys(own)
        with torch.no_grad(), torch.device("meta"), known:
            skeleton(**tree_map_only(Tensor, known.input_of(None), dict(options)))
    except Exception:  # it has read None
        return True
    finally:
        for one, own in before:
            one._parameters = own
    return False


def takes(model: Any, name: str) -> bool:
    """Whether the forward of a model has an argument."""
    return name in inspect.signature(model.forward).parameters


def _beside(model: nn.Module, blocks: tuple[str, ...]) -> Iterator[str]:
    """The outermost modules with parameters that hold no block."""
    around = {"", *(name for name, _ in model.named_modules() if any(block.startswith(f"{name}.") for block in blocks))}
    for name, module in model.named_modules():
        is_outermost = name not in around and name.rpartition(".")[0] in around
        if not is_outermost or name in blocks or next(module.parameters(), None) is None:
            continue
        if isinstance(module, nn.ModuleList | nn.ModuleDict):  # its elements are called, as in Gemma 3n
            around.add(name)
        else:
            yield name


def _sorted(model: nn.Module, forward: Forward, blocks: tuple[str, ...], beside: tuple[str, ...]) -> Order:
    """Modules that read no block's output are before the blocks. Others between blocks, as the last norm of an encoder,
    are blocks themselves."""
    run = [call.module for call in forward.calls]
    times = Counter(name for name in run if name in blocks)
    other = next((name for name in blocks if times[name] != 1), None)
    why_not = None if other is None else f"runs {other} {times[other]} times in a forward"
    if other is not None and not times[other]:
        return Order(why_not=why_not)
    dependent = _dependent(forward, blocks)
    late = [name for name in dict.fromkeys(run) if name in blocks or (name in beside and name in dependent)]
    early = [name for name in dict.fromkeys(run) if name in beside and name not in dependent]
    end = max(late.index(name) for name in blocks) + 1
    unrun = [name for name in beside if name not in run]
    shared = {id(p) for name in early for p in model.get_submodule(name).parameters()}
    tied = [name for name in unrun if all(id(p) in shared for p in model.get_submodule(name).parameters())]
    order = Order((*tied, *early), tuple(late[:end]), (*late[end:], *(name for name in unrun if name not in tied)))
    order = replace(order, why_not=why_not)
    return order if _is_whole(model, order) else Order(why_not="has parameters outside of the modules that it runs")


def _first_line(error: Exception) -> str:
    said = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {said}" if len(said) < LONGEST_CAUSE else type(error).__name__


def _dependent(forward: Forward, blocks: tuple[str, ...]) -> set[str]:
    """The modules of which some call reads what a block has computed, at any distance."""
    numbers: set[int] = set()
    for number, call in enumerate(forward.calls):
        if any(source in numbers or forward.calls[source].module in blocks for source, _ in call.reads):
            numbers.add(number)
    return {forward.calls[number].module for number in numbers}


def inputs_of(model: Any) -> Mapping[str, Tensor] | None:
    """A small input; None: the model takes other things than tokens, images or sounds. That of an
    encoder and a decoder is as long as it may be: their lengths decide what their blocks cost."""
    config, name = model.config, model.main_input_name
    is_pair = getattr(config, "is_encoder_decoder", False)
    tokens = torch.zeros(1, _longest(config) if is_pair else 4, dtype=torch.int64)
    first: dict[str, Tensor] | None = None
    size, channels = _of_images(config, "image_size") or ANY_SIZE, _of_images(config, "num_channels")
    if name == "input_ids":
        first = {name: tokens}
    elif name == "pixel_values" and channels is not None:
        first = {name: torch.zeros(1, channels, size, size)}
    elif name == "input_values" and hasattr(config, "conv_stride"):
        first = {name: torch.zeros(1, FRAMES * prod(config.conv_stride))}
    elif name == "input_features" and is_pair and hasattr(config, "num_mel_bins"):  # two frames for each position
        first = {name: torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)}
    return first if first is None or not is_pair else {**first, "decoder_input_ids": tokens}


def _longest(config: Any) -> int:
    names = ("max_target_positions", "n_positions", "max_position_embeddings")
    return next((int(found) for name in names if (found := getattr(config, name, None))), 512)


def _of_images(config: Any, name: str) -> int | None:
    found = getattr(config, name, getattr(getattr(config, "vision_config", None), name, None))
    return found if isinstance(found, int) else None
