"""One block of each kind of a model of transformers, with values and with the arguments of one call of it.

A copy of the model without memory is run once. The arguments of a block have shapes then, and are filled with random
numbers. So what a block computes can be tried in one process, without the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shoal.models.huggingface import experts
from shoal.models.huggingface.modules import pattern_of
from shoal.models.huggingface.order import inputs_of, takes
from shoal.parallel.lora.layers import without_lora
from shoal.parallel.pipeline.known_values import KnownValues
from shoal.parallel.pipeline.skeleton import Call, skeleton_of
from shoal.parallel.tensor_parts.arguments import by_name, names_of
from shoal.parallel.tensor_parts.linear_dims import linear_dims
from shoal.verification.exact_casts import keeping_float64

TOKENS = 4
SETTINGS = (bool, int, float, str, type(None))
WITHOUT_EFFECT = ("layer_idx", "layer_id", "training")
"""Settings of a module that number it."""


@dataclass(frozen=True)
class BlockCopy:
    """A block with random values in float64, and the arguments of one call of it."""

    module: nn.Module
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    names: tuple[str, ...]
    """The blocks of the model that are alike."""
    is_chained: bool = True
    """Whether each block of a list reads the first output of the one before, and nothing else changes it."""
    relayed: frozenset[str] = frozenset()
    """Arguments that an earlier block of the chain has returned, beside its activations."""
    relays: bool = False
    """Whether some block reads such an argument."""
    reads_first: bool = False
    """Whether the model reads nothing but the first output of a block, and not, for example, scores of attention."""

    def run(self) -> Any:
        """What the model reads of the block."""
        with keeping_float64("fp64", is_foreign=True):
            output = self.module(*self.arguments, **self.options)
        return output[0] if self.reads_first and isinstance(output, tuple | list) else output


def block_copies(model: Any, blocks: tuple[str, ...]) -> Iterator[BlockCopy]:
    """A copy of each kind of block; none, if the model cannot be run without values."""
    skeleton, clean = skeleton_of(model), skeleton_of(model)
    for copied in (skeleton, clean):
        without_lora(copied)  # adapters are cut as the layers that have them
    experts.install(clean)
    calls, relayed, is_chained = _calls(skeleton, blocks)
    reads_first = bool(calls) and _reads_first(skeleton, blocks)
    kinds: dict[Any, list[str]] = {}
    for name in calls:
        kinds.setdefault(_kind(name, skeleton.get_submodule(name)), []).append(name)
    for names in kinds.values():
        generator = torch.Generator().manual_seed(0)
        module = copy.deepcopy(clean.get_submodule(names[0])).to_empty(device="cpu").double().eval()
        _make_plain(module)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.copy_(_values(tensor, generator) / max(1, tensor.shape[-1] if tensor.dim() > 1 else 1) ** 0.5)
        arguments, options = tree_map_only(Tensor, partial(_values, generator=generator), calls[names[0]])
        options = {name: None if _is_cache(one) else one for name, one in options.items()}
        passed_on = relayed[names[0]]
        yield BlockCopy(
            module, arguments, options, tuple(names), is_chained, passed_on, any(relayed.values()), reads_first
        )


def _is_cache(value: object) -> bool:
    """Whether a model gives its blocks a cache, also without `use_cache`: it has been filled without memory."""
    return type(value).__name__.endswith("Cache")


def _make_plain(block: nn.Module) -> None:
    """Replace layers that compute the same as an nn.Linear, as Conv1D of GPT-2, by one."""
    found = {name: linear_dims(one) for name, one in block.named_modules() if type(one) is not nn.Linear}
    for name, dims in found.items():
        if dims is not None and name:
            old: Any = block.get_submodule(name)
            outputs, inputs = old.weight.shape[dims.outputs], old.weight.shape[dims.inputs]
            plain = nn.Linear(inputs, outputs, bias=getattr(old, "bias", None) is not None, dtype=torch.float64)
            block.set_submodule(name, plain)


def _calls(skeleton: Any, blocks: tuple[str, ...]) -> tuple[dict[str, Call], dict[str, frozenset[str]], bool]:
    """The arguments of each block, the names of those that an earlier one has returned, and whether blocks of each list
    are known to be a chain."""
    inputs = inputs_of(skeleton)
    if inputs is None:
        return {}, {}, False
    found: dict[str, Call] = {}
    relayed: dict[str, frozenset[str]] = {}
    links: list[tuple[str, Any, Any]] = []
    """Block, its input and its output, in the order of the calls."""
    beside: list[Any] = []
    """What blocks have returned beside their activations."""

    def note(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            found.setdefault(name, (arguments, dict(options)))
            given = by_name(names_of(module), arguments, options)
            known = (one for one, value in given.items() if any(value is x for x in beside if isinstance(x, Tensor)))
            relayed.setdefault(name, frozenset(known))
            links.append((name, arguments[0] if arguments else options.get("hidden_states"), None))

        return hook

    def note_output(_module: nn.Module, _arguments: Any, output: Any) -> None:
        several = isinstance(output, tuple | list)
        links[-1] = (*links[-1][:2], output[0] if several else output)
        beside.extend(output[1:] if several else ())

    experts.install(skeleton)
    with ExitStack() as stack:
        for name in blocks:
            block = skeleton.get_submodule(name)
            stack.callback(block.register_forward_pre_hook(note(name), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(note_output).remove)
        is_complete = _runs(skeleton, inputs)
    if not is_complete and found:  # the first block needs values, as some mixtures: the others get what it gets
        return dict.fromkeys(blocks, found[blocks[0]]), dict.fromkeys(blocks, frozenset()), False
    pairs = [(one, two) for one, two in pairwise(links) if _list_of(one[0]) == _list_of(two[0])]
    return found, relayed, len(links) == len(blocks) and all(output is x for (_, _, output), (_, x, _) in pairs)


def _list_of(block: str) -> str:
    return block.rpartition(".")[0]


def _reads_first(skeleton: Any, blocks: tuple[str, ...]) -> bool:
    """Whether a model runs when its blocks return, beside their first output, objects that nothing can be computed
    of. None would not do: T5 computes another position bias then."""

    def first_alone(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        if not isinstance(output, tuple | list):
            return output
        return type(output)([output[0], *[object() for _ in output[1:]]])

    inputs = inputs_of(skeleton)
    with ExitStack() as stack:
        for name in blocks:
            stack.callback(skeleton.get_submodule(name).register_forward_hook(first_alone).remove)
        return inputs is not None and _runs(skeleton, inputs)


def _runs(skeleton: Any, inputs: Mapping[str, Tensor]) -> bool:
    """Run a model without memory; False: it needs other inputs, or real values."""
    known = KnownValues()
    options: dict[str, Any] = {name: known.input_of(torch.float32)(x) for name, x in _short(inputs).items()}
    try:
        with torch.enable_grad(), torch.device("meta"), known:
            skeleton(**options, **({"use_cache": False} if takes(skeleton, "use_cache") else {}))
    except Exception:
        return False
    return True


def _short(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x[:, :TOKENS] if not x.is_floating_point() else x for name, x in inputs.items()}


def _kind(name: str, block: nn.Module) -> Any:
    """The same for blocks that compute the same with other values."""
    settings = tuple(
        (
            inner,
            type(module),
            *sorted((key, repr(value)) for key, value in vars(module).items() if _is_setting(key, value)),
        )
        for inner, module in block.named_modules()
    )
    return pattern_of(name), settings, tuple((inner, tuple(p.shape)) for inner, p in block.named_parameters())


def _is_setting(key: str, value: Any) -> bool:
    return isinstance(value, SETTINGS) and key not in WITHOUT_EFFECT


def _values(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers; every token may be seen by a mask, and has the number 0."""
    if like.is_floating_point():
        made = torch.randn(like.shape, dtype=torch.float64, generator=generator)
        return made.requires_grad_(like.requires_grad and not isinstance(like, nn.Parameter))
    return (
        torch.ones(like.shape, dtype=like.dtype)
        if like.dtype == torch.bool
        else torch.zeros(like.shape, dtype=like.dtype)
    )
