"""Find the layers of a block that tensor parallelism may split, by what the block computes.

A *region* begins with layers that are split by columns and ends with one that is split by rows:

    x ── query, key, value ── attention ── dense ── + x     columns: query, key, value     row: dense

It is found by gradients: nothing but the outputs of the columns leads to the input of the row, and they lead to nothing
else. It is proven by numbers: the block is run with the first half of every layer, then with the second, and both
together give what the whole layers give. Code that reads the number of heads must see a half of them: attributes of the
module around the columns are halved until the numbers are right. Else the region stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.models.huggingface.block_copies import BlockCopy
from shoal.parallel.tensor_parts.attributes import divide_attributes
from shoal.parallel.tensor_parts.packed import cut

TOLERANCE = 1e-5
"""Relative. Code of transformers casts to float32 here and there; a wrong cut differs by about 1."""
HALVES = 2


@dataclass(frozen=True)
class Region:
    """Layers that are split together. Names are those inside the block."""

    columns: tuple[str, ...]
    row: str
    home: str
    """The innermost module around the columns."""
    reads_home: bool
    """Whether all columns read the first argument of it, or its `hidden_states`."""
    divided: tuple[str, ...] = ()
    """Attributes of `home` of which a rank has its part."""
    parts: tuple[int, ...] = ()
    """The sizes of what a single column holds, as queries, keys and values; none: it holds one thing."""


def regions_of(block: BlockCopy) -> Iterator[Region]:
    """The regions of a block that were proven."""
    with torch.enable_grad():
        candidates = _Flow(block).regions()
    for region in candidates:
        if (proven := _proven(block, region)) is not None:
            yield proven


def linears(block: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers inside a block."""
    return {name: one for name, one in block.named_modules() if type(one) is nn.Linear}


# ---- by gradients ---------------------------------------------------------------------------------------------------


class _Flow:
    """One run of a block in which the output of every linear layer is cut from what it was computed of."""

    def __init__(self, block: BlockCopy) -> None:
        self.linears = linears(block.module)
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.homes: dict[str, Tensor] = {}
        """Module → its first argument."""
        self._twice: set[str] = set()
        weights = {id(p) for linear in self.linears.values() for p in linear.parameters()}
        given = [x for x in tree_leaves((block.arguments, block.options)) if isinstance(x, Tensor) and x.requires_grad]
        self._others = [p for p in block.module.parameters() if id(p) not in weights] + given
        with ExitStack() as stack:
            for name, module in block.module.named_modules():
                stack.callback(module.register_forward_pre_hook(self._before(name), with_kwargs=True).remove)
                if name in self.linears:
                    stack.callback(module.register_forward_hook(self._after(name)).remove)
            returned = [x for x in tree_leaves(block.run()) if isinstance(x, Tensor) and x.requires_grad]
        self.feeds = {name: self._sources([x]) for name, x in self.inputs.items()}
        self.returned, _ = self._sources(returned)

    def _before(self, name: str) -> Any:
        def hook(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            x = arguments[0] if arguments else options.get("hidden_states")
            if isinstance(x, Tensor):
                self._twice |= {name} if name in self.homes else set()
                self.homes[name] = x
                if name in self.linears:
                    self.inputs[name] = x

        return hook

    def _after(self, name: str) -> Any:
        def hook(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
            self.outputs[name] = output.detach().requires_grad_()
            return self.outputs[name]

        return hook

    def _sources(self, tensors: list[Tensor]) -> tuple[set[str], bool]:
        """The linear layers whose outputs lead to some tensors, and whether anything else does."""
        total = sum((x.double().sum() for x in tensors if x.requires_grad), torch.zeros(()))
        if not total.requires_grad:
            return set(), False
        leaves = [*self.outputs.values(), *self._others]
        found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        names = {name for name, grad in zip(self.outputs, found, strict=False) if grad is not None}
        return names, any(grad is not None for grad in found[len(self.outputs) :])

    def regions(self) -> list[Region]:
        used: set[str] = set()
        regions = []
        for row, (columns, has_others) in self.feeds.items():
            readers = {name for name, (sources, _) in self.feeds.items() if sources & columns}
            layers = {*columns, row}
            if has_others or not columns or readers != {row} or columns & self.returned:
                continue
            if layers & (used | self._twice) or not all(self._is_even(name) for name in layers):
                continue
            used |= layers
            regions.append(self._region(tuple(name for name in self.feeds if name in columns), row))
        return regions

    def _is_even(self, name: str) -> bool:
        return not any(size % HALVES for size in self.linears[name].weight.shape)

    def _region(self, columns: tuple[str, ...], row: str) -> Region:
        parts = [name.split(".")[:-1] for name in columns]
        depth = next(
            (i for i, same in enumerate(zip(*parts, strict=False)) if len(set(same)) > 1), min(map(len, parts))
        )
        home = ".".join(parts[0][:depth])
        reads = (
            bool(home)
            and home not in self._twice
            and all(self.homes.get(home) is self.inputs[name] for name in columns)
        )
        return Region(columns, row, home, reads)


# ---- by numbers -----------------------------------------------------------------------------------------------------


@dataclass
class _Result:
    """What the row makes of its input, without a bias, and all that the block returns."""

    row: Tensor
    returned: list[Tensor]


def _proven(block: BlockCopy, region: Region) -> Region | None:
    whole = _result(block, region, None)
    if whole is None:
        return None
    home = block.module.get_submodule(region.home)
    for parts in _parts(block.module, region):
        for divided in _attributes(home, parts or (_features(block.module, region),)):
            tried = replace(region, divided=divided, parts=parts)
            halves = []
            for index in range(HALVES):
                with _cut(block.module, tried, index), _divided(home, divided, HALVES):
                    halves.append(_result(block, tried, whole.row))
            if _are_parts([half for half in halves if half is not None], whole):
                return tried
    return None


def _features(block: nn.Module, region: Region) -> int:
    column: Any = block.get_submodule(region.columns[0])
    return int(column.out_features)


def _parts(block: nn.Module, region: Region) -> Iterator[tuple[int, ...]]:
    """What one column may hold: one thing; a gate and its values; queries, keys and values, of as many heads or not."""
    yield ()
    if len(region.columns) > 1:
        return
    row: Any = block.get_submodule(region.row)
    size, queries = _features(block, region), int(row.in_features)
    for number in (2, 3):
        if size % (number * HALVES) == 0:
            yield (size // number,) * number
    keys = (size - queries) // 2
    if keys > 0 and (size - queries) % (2 * HALVES) == 0 and keys != queries:
        yield queries, keys, keys


def _are_parts(halves: list[_Result], whole: _Result) -> bool:
    """Whether the rows add up, and all else that the block returns does not depend on the cut."""
    if len(halves) < HALVES or any(half.row.shape != whole.row.shape for half in halves):
        return False
    total = torch.stack([half.row for half in halves]).sum(0)
    rest = (pair for half in halves for pair in zip(half.returned, whole.returned, strict=True))
    return _is_close(total, whole.row) and all(_is_close(one, other) for one, other in rest)


def _is_close(one: Tensor, other: Tensor) -> bool:
    is_alike = one.shape == other.shape
    return is_alike and bool((one - other).abs().amax() <= TOLERANCE * other.abs().amax())


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
    inside = tuple(f"config.{name}" for name in said if type(getattr(config, name, None)) is int)
    if inside:
        yield inside
        yield heads + inside


def _counts_heads(name: str) -> bool:
    words = name.split("_")
    return "heads" in words and not {"dim", "size", "groups"} & set(words)


def _result(block: BlockCopy, region: Region, total: Tensor | None) -> _Result | None:
    """Run the block; after the row it continues with `total`, the sum over ranks. None: the block cannot be run so."""
    row: Any = block.module.get_submodule(region.row)
    found: list[Tensor] = []

    def hook(_module: nn.Module, arguments: tuple[Any, ...], _output: Tensor) -> Tensor:
        found.append(F.linear(arguments[0], row.weight))
        summed = found[0] if total is None else total
        return summed if row.bias is None else summed + row.bias

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
    """Layers of a region with one half of their weights."""
    dims: Mapping[str, int] = {**dict.fromkeys(region.columns, 0), region.row: 1}
    before = {name: (block.get_submodule(name).weight, block.get_submodule(name).bias) for name in dims}
    try:
        for name, dim in dims.items():
            layer: Any = block.get_submodule(name)
            parts = region.parts if dim == 0 else ()
            layer.weight = nn.Parameter(cut(layer.weight.detach(), dim, parts, index=index, degree=HALVES))
            if dim == 0 and layer.bias is not None:
                layer.bias = nn.Parameter(cut(layer.bias.detach(), 0, parts, index=index, degree=HALVES))
        yield
    finally:
        for name, (weight, bias) in before.items():
            layer = block.get_submodule(name)
            layer.weight, layer.bias = weight, bias


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
