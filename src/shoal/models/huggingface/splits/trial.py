"""Prove a region by numbers: the halves of its layers add up to the whole.

The block is run with the first half of every layer, then with the second, and both together give what the whole layers
give. Code that reads the number of heads must see a half of them: attributes of the module around the columns are
halved until the numbers are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.models.huggingface.splits.block_copies import BlockCopy
from shoal.models.huggingface.splits.flow import HALVES
from shoal.models.huggingface.splits.regions import Region
from shoal.parallel.tensor_parts.attributes import divide_attributes
from shoal.parallel.tensor_parts.packed import cut

TOLERANCE = 1e-5
"""Relative. Code of transformers casts to float32 here and there; a wrong cut differs by about 1."""


@dataclass
class _Result:
    """What the row makes of its input, without a bias, and all that the block returns."""

    row: Tensor
    returned: list[Tensor]


def proven(block: BlockCopy, region: Region) -> Region | None:
    """The region with the way to cut it that gives the right numbers; None: there is none."""
    whole = _result(block, region, None)
    if whole is None:
        return None
    home = block.module.get_submodule(region.home)
    for parts in _parts(block.module, region):
        sizes = parts or (_layer(block.module, region.columns[0]).out_features,)
        for cuts in _cuts(block.module, region, sizes):
            for divided in _attributes(home, sizes):
                tried = replace(region, divided=divided, parts=parts, cuts=cuts)
                if _is_proven(block, tried, whole):
                    return tried
    return None


def _is_proven(block: BlockCopy, region: Region, whole: _Result) -> bool:
    home, halves = block.module.get_submodule(region.home), []
    for index in range(HALVES):
        with _cut(block.module, region, index), _divided(home, region.divided, HALVES):
            halves.append(_result(block, region, whole.row))
    return _are_parts([half for half in halves if half is not None], whole)


def _layer(block: nn.Module, name: str) -> nn.Linear:
    layer = block.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer


# ---- ways to cut ----------------------------------------------------------------------------------------------------


def _parts(block: nn.Module, region: Region) -> Iterator[tuple[int, ...]]:
    """What one column may hold: one thing; a gate and its values; queries, keys and values, of as many heads or not."""
    yield ()
    if len(region.columns) > 1:
        return
    size, queries = _layer(block, region.columns[0]).out_features, _layer(block, region.row).in_features
    for number in (2, 3):
        if size % (number * HALVES) == 0:
            yield (size // number,) * number
    keys = (size - queries) // 2
    if keys > 0 and (size - queries) % (2 * HALVES) == 0 and keys != queries:
        yield queries, keys, keys


def _cuts(block: nn.Module, region: Region, sizes: tuple[int, ...]) -> Iterator[tuple[tuple[str, int], ...]]:
    """Parameters beside the linear layers that may be cut: none; those with one entry for each head; those with one for
    each feature. A parameter of `home` itself must be cut: the split of a module says nothing of its own ones."""
    home = block.get_submodule(region.home)
    inside: Any = (getattr(home, "config", None), home)
    named = (item for one in inside for item in vars(one or object).items())
    heads = {value for name, value in named if type(value) is int and _counts_heads(name)}  # Swin lists one per stage
    shapes = {name: tuple(block.get_parameter(name).shape) for name in region.others}
    must = {name for name in region.others if name.rpartition(".")[0] == region.home}
    tried = set()
    for wanted in (set(), heads, {*sizes}):
        found = {
            name: dim
            for name, shape in shapes.items()
            for dim, size in enumerate(shape)
            if size in wanted and size % HALVES == 0
        }
        if must <= found.keys() and (cuts := tuple(found.items())) not in tried:
            tried.add(cuts)
            yield cuts


def _attributes(home: nn.Module, sizes: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    """What may count heads or features: nothing; numbers of heads; all features, too; those of the configuration."""
    yield ()
    own = {name: value for name, value in vars(home).items() if type(value) is int and value % HALVES == 0 and value}
    heads = tuple(name for name in own if _counts_heads(name))
    features = tuple(name for name, value in own.items() if value in sizes and name not in heads)
    if heads:
        yield heads
    if features:
        yield heads + features
    config: Any = getattr(home, "config", None)
    said = ("num_attention_heads", "num_key_value_heads")
    numbers = {name: getattr(config, name, None) for name in said}
    inside = tuple(f"config.{name}" for name, one in numbers.items() if type(one) is int and one % HALVES == 0)
    if inside:
        yield inside
        yield heads + inside


def _counts_heads(name: str) -> bool:
    words = name.split("_")
    is_number = "heads" in words or words in (["n", "head"], ["num", "head"])
    return is_number and not {"dim", "size", "groups"} & set(words)


# ---- numbers --------------------------------------------------------------------------------------------------------


def _are_parts(halves: list[_Result], whole: _Result) -> bool:
    """Whether the rows add up, and all else that the block returns does not depend on the cut."""
    if len(halves) < HALVES or any(half.row.shape != whole.row.shape for half in halves):
        return False
    total = torch.stack([half.row for half in halves]).sum(0)
    rest = (pair for half in halves for pair in zip(half.returned, whole.returned, strict=True))
    return is_close(total, whole.row) and all(is_close(one, other) for one, other in rest)


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and, to rounding, the same numbers."""
    is_alike = one.shape == other.shape
    return is_alike and bool((one - other).abs().amax() <= TOLERANCE * other.abs().amax())


def _result(block: BlockCopy, region: Region, total: Tensor | None) -> _Result | None:
    """Run the block; after the row it continues with `total`, the sum over ranks. None: the block cannot be run so."""
    row: Any = block.module.get_submodule(region.row)
    found: list[Tensor] = []

    def hook(_module: nn.Module, arguments: tuple[Any, ...], _output: Tensor) -> Tensor:
        found.append(F.linear(arguments[0], row.weight))
        summed = found[0] if total is None else total
        return summed.clone() if row.bias is None else summed + row.bias  # code may add to it in place

    handle = row.register_forward_hook(hook)
    try:
        with torch.no_grad():
            returned = [x for x in tree_leaves(block.run()) if isinstance(x, Tensor) and x.is_floating_point()]
    except Exception:  # halves do not fit together
        return None
    finally:
        handle.remove()
    return _Result(found[0], returned)


@contextmanager
def _cut(block: nn.Module, region: Region, index: int) -> Iterator[None]:
    """Layers and parameters of a region with one half of their numbers."""
    dims = dict(region.cuts) | {f"{name}.{own}": 0 for name in region.columns for own in ("weight", "bias")}
    dims[f"{region.row}.weight"] = 1
    parts = {f"{name}.{own}": region.parts for name in region.columns for own in ("weight", "bias")}
    before = {name: p for name, p in block.named_parameters() if name in dims}
    try:
        for name, p in before.items():
            piece = cut(p.detach(), dims[name], parts.get(name, ()), index=index, degree=HALVES)
            _set(block, name, nn.Parameter(piece))
        yield
    finally:
        for name, p in before.items():
            _set(block, name, p)


def _set(block: nn.Module, name: str, value: nn.Parameter) -> None:
    module, _, own = name.rpartition(".")
    setattr(block.get_submodule(module), own, value)


@contextmanager
def _divided(module: Any, names: tuple[str, ...], degree: int) -> Iterator[None]:
    """A module with a part of some of its numbers."""
    before = {name.partition(".")[0]: getattr(module, name.partition(".")[0]) for name in names}
    try:
        divide_attributes(module, names, degree)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
