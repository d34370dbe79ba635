"""Tensors as files name them ↔ tensors as the model of transformers names them.

Files keep the names, and the cuts, of the first release of a model. Mixtral's have one tensor per expert:

    block_sparse_moe.experts.0.w1.weight ┐
    block_sparse_moe.experts.0.w3.weight ├─▶ mlp.experts.gate_up_proj
    block_sparse_moe.experts.1.w1.weight ┘

transformers lists these conversions, for its own loader and not as a public interface. So this file alone reads the
list, and a test compares the results with `from_pretrained` and `save_pretrained`. Nothing is read here. Where tensors
are stacked and joined, the result is made of their boxes, so that a rank reads its part alone. All other conversions
are computed by transformers, from full tensors, one group at a time.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.formats.lazy_tensor import Box, LazyTensor, full, part_of
from shoal.errors import ShoalError, to_install

Tensors = dict[str, LazyTensor]


@dataclass
class _Group:
    """Tensors that one conversion takes together."""

    convert: Any
    """transformers' WeightConverter; None: the tensor keeps its values."""
    sources: dict[str, list[LazyTensor]] = field(default_factory=lambda: defaultdict(list))
    """Pattern of the conversion → its tensors, in order."""


def to_model(model: Any, tensors: Mapping[str, LazyTensor]) -> tuple[Tensors, list[str]]:
    """The tensors of files under the names of the model; and the names of those that it has no place for."""
    core = _core()
    mapping = _mapping(model)
    renamings = [one for one in mapping if isinstance(one, core.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, core.WeightConverter)]
    known, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, _Group] = {}
    unexpected: list[str] = []
    for name in sorted(tensors, key=core.dot_natural_key):
        new, pattern = core.rename_source_key(name, renamings, converters, prefix, known)
        if new not in known and name in known:  # it has its new name already
            new, pattern = core.rename_source_key(name, [], [], prefix, known)
        if new not in known:
            unexpected.append(name)
            continue
        converter = None if pattern is None else _with_pattern(converters, pattern)
        groups.setdefault(new, _Group(converter)).sources[pattern or ""].append(tensors[name])
    found: Tensors = {}
    for name, group in groups.items():
        found.update(_converted(model, name, group))
    return found, unexpected


def to_files(model: Any, tensors: Mapping[str, LazyTensor]) -> Tensors:
    """The tensors of a model under the names, and with the cuts, of files."""
    core = _core()
    mapping = _mapping(model, add_legacy=False)
    back = [one.reverse_transform() for one in mapping[::-1] if not isinstance(one, core.PrefixChange)]
    renamings = [one for one in back if isinstance(one, core.WeightRenaming)]
    converters = [one for one in back if isinstance(one, core.WeightConverter)]
    groups: dict[str, _Group] = {}
    for name in sorted(tensors, key=core.dot_natural_key):
        new, pattern = core.apply_converters(name, converters)
        converter = None if pattern is None else _with_pattern(converters, pattern)
        groups.setdefault(new, _Group(converter)).sources[pattern or ""].append(tensors[name])
    return {
        core.apply_renamings(old, renamings): tensor
        for name, group in groups.items()
        for old, tensor in _converted(model, name, group).items()
    }


def ignored(model: Any, names: Sequence[str]) -> list[str]:
    """The names that transformers expects in files although the model has no such tensor."""
    patterns = [r"rotary_emb\.inv_freq$", *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


def _mapping(model: Any, **options: Any) -> Any:
    return import_module("transformers.conversion_mapping").get_model_conversion_mapping(model, **options)


def _core() -> Any:
    try:
        core = import_module("transformers.core_model_loading")
        import_module("transformers.conversion_mapping")
    except ImportError:
        version = import_module("transformers").__version__
        raise ShoalError(
            f"the weights of a folder need transformers 5.21 or later, got {version}", fix=to_install("hf"), code="R027"
        ) from None
    return core


def _with_pattern(converters: Sequence[Any], pattern: str) -> Any:
    return next(one for one in converters if pattern in one.source_patterns)


# ---- one group ------------------------------------------------------------------------------------------------------


def _converted(model: Any, name: str, group: _Group) -> Tensors:
    if group.convert is None:
        [tensor] = group.sources[""]
        return {name: tensor}
    shapes = _computed(model, name, group, lambda tensor: torch.empty(tensor.shape, device="meta"))
    kinds = [type(operation).__name__ for operation in group.convert.operations]
    dims = [getattr(operation, "dim", None) for operation in group.convert.operations]
    dtype = next(iter(group.sources.values()))[0].dtype
    if (kinds, dims) in _STACKED and len(shapes) == 1:
        [(target, shape)] = shapes.items()
        return {target: LazyTensor(dtype, tuple(shape.shape), tuple(_stacked(group)))}
    if (kinds, dims) in _TAKEN_APART and len(group.sources) == 1:
        return _taken_apart(model, name, group)
    whole = _Whole(model, name, group)
    return {target: _one_box(dtype, tuple(one.shape), partial(whole, target)) for target, one in shapes.items()}


_STACKED = [(["MergeModulelist"], [0]), (["MergeModulelist", "Concatenate"], [0, 1])]
_TAKEN_APART = [(["SplitModulelist"], [0]), (["Chunk", "SplitModulelist"], [1, 0])]
"""Operations of transformers, and their dims, whose results consist of boxes of tensors."""


def _one_box(dtype: str, shape: tuple[int, ...], read: Callable[[], Tensor]) -> LazyTensor:
    return LazyTensor(dtype, shape, (Box((0,) * len(shape), shape, read),))


def _stacked(group: _Group) -> Iterator[Box]:
    """The boxes of tensors that are stacked, and then joined by rows."""
    row = 0
    for pattern in group.convert.source_patterns:
        tensors = group.sources.get(pattern, [])
        for number, tensor in enumerate(tensors):
            for box in tensor.boxes:
                begin = (number, row + box.begin[0], *box.begin[1:])
                yield Box(begin, (1, *box.shape), partial(_unsqueezed, box))
        row += tensors[0].shape[0] if tensors else 0


def _unsqueezed(box: Box) -> Tensor:
    return box.read()[None]


def _taken_apart(model: Any, name: str, group: _Group) -> Tensors:
    """The tensors of one that is cut by rows and unstacked. Numbers in place of its rows show which is which."""
    [(pattern, [tensor])] = group.sources.items()
    parts = len(group.convert.target_patterns)
    experts, rows = tensor.shape[0], tensor.shape[1] // parts
    places = torch.arange(experts * parts).view(experts, parts, *(1 for _ in tensor.shape[2:]))
    numbered = _Group(group.convert, {pattern: [tensor]})
    found = _computed(model, name, numbered, lambda _: places)
    shape = (1, rows, *tensor.shape[2:])
    return {
        target: part_of(tensor, (int(place) // parts, int(place) % parts * rows, *(0 for _ in shape[2:])), shape)
        for target, place in found.items()
    }


def _computed(model: Any, name: str, group: _Group, value: Any) -> dict[str, Tensor]:
    """The results of transformers' own operations."""
    converter = copy.deepcopy(group.convert)
    for pattern, tensors in group.sources.items():
        for tensor in tensors:
            converter.add_tensor(name, name, pattern, value(tensor))
    found = converter.convert(name, model=model, config=model.config)
    return {target: one[0] if isinstance(one, list) else one for target, one in found.items()}


class _Whole:
    """Compute all results of a group, and keep those that are not taken yet."""

    def __init__(self, model: Any, name: str, group: _Group) -> None:
        self._arguments = (model, name, group)
        self._known: dict[str, Tensor] = {}

    def __call__(self, target: str) -> Tensor:
        if target not in self._known:
            self._known = _computed(*self._arguments, full)
        return self._known.pop(target)
