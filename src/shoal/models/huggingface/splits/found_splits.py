"""The splits of a model of transformers that declares none: what its blocks compute shows them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shoal.blueprint.description import Split
from shoal.blueprint.placement import is_inside
from shoal.models.huggingface.modules import attentions, blocks_without_plan, pattern_of
from shoal.models.huggingface.order import ends
from shoal.models.huggingface.splits.block_copies import BlockCopy, block_copies
from shoal.models.huggingface.splits.flow import Flow
from shoal.models.huggingface.splits.regions import Region
from shoal.models.huggingface.splits.trial import proven
from shoal.parallel.tensor_parts.linear_dims import PLAIN, linear_dims


@dataclass
class FoundSplits:
    """What was found. Names are those of submodules of the model."""

    splits: dict[str, Split] = field(default_factory=dict)
    """Of layers and regions; all else is whole."""
    per_rank: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    """Parameter → the dim along which it is cut, where that is not what its split says."""
    homes: dict[str, bool] = field(default_factory=dict)
    """The innermost module around the columns of each region → whether they read its input."""
    unproven: list[str] = field(default_factory=list)
    """Candidates whose halves do not add up to the whole, and blocks that could not be tried; in words."""

    def unread(self) -> str | None:
        """A region whose layers do not all read its input: its code may read the shape of divided tokens."""
        return next((home for home, is_read in self.homes.items() if not is_read), None)

    def around(self, known: Iterable[str]) -> str | None:
        """A region that is inside of an attention, or that is given all tokens and holds one."""
        pairs = [(home, attention) for home in self.homes for attention in known if home != attention]
        return next((a for a, b in pairs if is_inside(a, [b]) or (self.homes[a] and is_inside(b, [a]))), None)


_known: WeakKeyDictionary[nn.Module, FoundSplits] = WeakKeyDictionary()


def found_splits(model: Any, except_for: Collection[str]) -> FoundSplits:
    """The regions of all blocks that were proven, without those that are known."""
    if model not in _known:
        found = _known[model] = FoundSplits()
        if not _are_left(model, except_for):
            return found
        shared = shared_in(model)
        for block in block_copies(model, tuple(blocks_without_plan(model))):
            for region in regions_of(block, found.unproven):
                if any(f"{block.names[0]}.{name}" in shared for name in (*region.columns, *region.latent, region.row)):
                    continue  # one piece could not have the place of all its names
                for name in block.names:
                    if not is_inside(f"{name}.{region.row}", except_for):
                        _add(found, model, name, region)
    return _known[model]


def shared_in(model: nn.Module) -> set[str]:
    """Modules inside blocks with parameters that have other names, too."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name.rpartition(".")[0])
    blocks = tuple(blocks_without_plan(model))
    return {name for several in names.values() if len(several) > 1 for name in several if is_inside(name, blocks)}


def regions_of(block: BlockCopy, unproven: list[str] | None = None) -> Iterator[Region]:
    """The regions of a block that were proven. The others are noted."""
    try:
        with torch.enable_grad():
            candidates = Flow(block).regions()
    except Exception:  # it reads what a trial does not give it
        candidates = []
    for region in candidates:
        found = proven(block, region)
        if found is not None:
            yield found
        elif unproven is not None:
            columns = ", ".join(pattern_of(f"{block.names[0]}.{name}") for name in region.columns)
            unproven.append(f"{columns} to {region.row}")


def _are_left(model: Any, known: Collection[str]) -> bool:
    """Whether some linear layer of a block is in no region that is known."""
    inside = (item for block in blocks_without_plan(model) for item in _named(model, block))
    return any(not is_inside(name, known) and linear_dims(module) is not None for name, module in inside)


def _named(model: Any, block: str) -> Iterator[tuple[str, nn.Module]]:
    yield from model.get_submodule(block).named_modules(prefix=block)


def _add(found: FoundSplits, model: Any, block: str, region: Region) -> None:
    whole = {name.rpartition(".")[0] for name in region.others}
    found.splits |= {f"{block}.{name}": Split.HEADS for name in whole if name != region.home}
    found.splits |= {f"{block}.{name}": Split.LATENT for name in region.latent}
    found.splits |= {f"{block}.{name}": Split.COLUMN for name in region.columns}
    found.splits[f"{block}.{region.row}"] = Split.ROW
    found.cuts |= {f"{block}.{name}": dim for name, dim in region.cuts}
    for name in (*region.columns, region.row):
        dims = linear_dims(model.get_submodule(f"{block}.{name}")) or PLAIN
        if dims is not PLAIN:
            found.cuts[f"{block}.{name}.weight"] = dims.inputs if name == region.row else dims.outputs
    home = f"{block}.{region.home}".removesuffix(".")
    found.homes[home] = region.reads_home
    if region.reads_home:
        found.splits[home] = Split.REGION
    if region.parts:
        found.parts[f"{block}.{region.columns[0]}"] = region.parts
    if region.divided:
        found.per_rank[home] = region.divided


def vocabulary_of(model: Any) -> dict[str, nn.Module]:
    """The embedding of tokens and the layer of logits, with all modules that share their parameters. None, if one of
    these is of another kind, or if the model needs labels and computes a loss of whole logits itself."""
    if getattr(model.config, "is_encoder_decoder", False):
        return {}
    layers = [one for one in ends(model) if isinstance(one, nn.Embedding) or type(one) is nn.Linear]
    shared = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
    found = {
        name: module
        for name, module in model.named_modules()
        if any(id(p) in shared for p in module.parameters(recurse=False))
    }
    is_beside = any(_adds_to_logits(model, layer, shared) for layer in layers if type(layer) is nn.Linear)
    return found if not is_beside and all(_may_share(module, shared) for module in found.values()) else {}


def _adds_to_logits(model: nn.Module, head: nn.Linear, shared: set[int]) -> bool:
    """Whether a module around the head has a number for each logit that the head has not, as the bias of ESM."""
    around = (one for one in model.modules() if one is not head and any(head is inner for inner in one.modules()))
    own = (p for one in around for p in one.parameters(recurse=False))
    return any(head.out_features in p.shape and id(p) not in shared for p in own)


def _may_share(module: nn.Module, shared: set[int]) -> bool:
    """Whether a module looks up, multiplies, or only has another name for the bias of a layer inside it."""
    if isinstance(module, nn.Embedding) or type(module) is nn.Linear:
        return True
    own = {id(p) for p in module.parameters(recurse=False)}
    inside = {id(p) for one in module.children() for p in one.parameters(recurse=False)}
    return own <= shared and own <= inside


def heads_of(model: Any, declared: int | None) -> int | None:
    """A number of heads that divides those of all attentions."""
    names = ("num_heads", "num_attention_heads", "n_heads")
    counts = [getattr(one, name, None) for one in attentions(model).values() for name in names]
    found = [count for count in (*counts, declared) if isinstance(count, int)]
    return math.gcd(*found) if found else None
