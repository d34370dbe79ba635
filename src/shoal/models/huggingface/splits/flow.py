"""Candidates for regions of a block, by gradients: which layers lead to which.

In a *plain* region nothing but the outputs of the columns leads to the input of the row, and they lead to nothing else.
In a *deep* one the module around them has more: all inside comes from its input, and leaves through the row.

    x ─┬─ q_a ── norm ── q_b| ──┐                 columns: q_b, kv_b     latent: q_a, kv_a     row: o
       └─ kv_a ─┬─ norm ── kv_b| ─┴─ attention ── o-
                └───────────────────┘
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.blueprint.placement import is_inside
from shoal.models.huggingface.splits.block_copies import BlockCopy
from shoal.models.huggingface.splits.regions import Region

HALVES = 2


class Flow:
    """One run of a block in which the output of every linear layer is cut from what it was computed of. `home`: a
    module whose input is cut, too."""

    def __init__(self, block: BlockCopy, home: str | None = None) -> None:
        self._block, self._home = block, home
        self.linears = {name for name, one in block.module.named_modules() if type(one) is nn.Linear}
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.homes: dict[str, Tensor] = {}
        """Module → its first argument."""
        self._twice: set[str] = set()
        given = [x for x in tree_leaves((block.arguments, block.options)) if isinstance(x, Tensor) and x.requires_grad]
        first = block.arguments[0] if block.arguments else block.options.get("hidden_states")
        self._beside = [x for x in given if x is not first]
        """Arguments of the block beside its activations, as the output of an encoder."""
        trained = {name: p for name, p in block.module.named_parameters() if p.requires_grad}
        own = {name: p for name, p in trained.items() if name.rpartition(".")[0] not in self.linears}
        self._others = own | {f" argument {number}": x for number, x in enumerate(given)}
        with ExitStack() as stack:
            for name, module in block.module.named_modules():
                stack.callback(module.register_forward_pre_hook(self._before(name), with_kwargs=True).remove)
                if name in self.linears:
                    stack.callback(module.register_forward_hook(self._after(name)).remove)
            returned = [x for x in tree_leaves(block.run()) if isinstance(x, Tensor) and x.requires_grad]
        self.feeds = {name: self._sources([x]) for name, x in self.inputs.items()}
        """Layer → the names of layers, parameters and arguments that lead to its input."""
        self.returned = self._sources(returned)

    def _before(self, name: str) -> Any:
        def hook(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
            x = arguments[0] if arguments else options.get("hidden_states")
            if not isinstance(x, Tensor):
                return None
            if name == self._home:
                self._others[" home"] = x.detach().requires_grad_()
                x = self._others[" home"].clone()  # code may change it in place, and no leaf
            self._twice |= {name} if name in self.homes else set()
            self.homes[name] = x
            if name in self.linears:
                self.inputs[name] = x
            if name != self._home:
                return None
            return ((x, *arguments[1:]), options) if arguments else (arguments, {**options, "hidden_states": x})

        return hook

    def _after(self, name: str) -> Any:
        def hook(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
            self.outputs[name] = output.detach().requires_grad_()
            return self.outputs[name].clone()

        return hook

    def _sources(self, tensors: list[Tensor]) -> set[str]:
        total = sum((x.double().sum() for x in tensors if x.requires_grad), torch.zeros(()))
        if not total.requires_grad:
            return set()
        leaves = self.outputs | self._others
        found = torch.autograd.grad(total, list(leaves.values()), retain_graph=True, allow_unused=True)
        return {name for name, grad in zip(leaves, found, strict=True) if grad is not None}

    def regions(self) -> list[Region]:
        """The candidates, those that end first last."""
        used: set[str] = set()
        regions = []
        for row in reversed(self.feeds):
            region = self._plain(row) or self._deep(row)
            layers = set() if region is None else {*region.columns, *region.latent, region.row}
            if region is None or layers & (used | self._twice) or not self._are_even({*region.columns, row}):
                continue
            used |= layers
            regions.append(region)
        return regions[::-1]

    def _are_even(self, names: Iterable[str]) -> bool:
        weights = [self._block.module.get_parameter(f"{name}.weight") for name in names]
        return not any(size % HALVES for weight in weights for size in weight.shape)

    def _plain(self, row: str) -> Region | None:
        columns = self.feeds[row]
        readers = {name for name, sources in self.feeds.items() if sources & columns}
        if columns - self.linears or not columns or readers != {row} or columns & self.returned:
            return None
        ordered = tuple(name for name in self.feeds if name in columns)
        home = _around(ordered)
        reads = bool(home) and home not in self._twice
        read = [name for name in columns if not any(self.inputs[name] is x for x in self._beside)]
        reads = reads and bool(read) and all(self.homes.get(home) is self.inputs[name] for name in read)
        reads = reads and Flow(self._block, home)._is_read_by(columns)
        return Region(ordered, row, home, reads)

    def _deep(self, row: str) -> Region | None:
        layers = self.feeds[row] & self.linears
        home = _around([row, *layers])
        module = self._block.module.get_submodule(home)
        has_experts = any(hasattr(one, "_is_expert_parallel") for one in module.modules())
        if not layers or not home or home in self._twice or home not in self.homes or has_experts:
            return None
        inside = [name for name in self.feeds if is_inside(name, [home]) and name != row]
        read = set().union(*(self.feeds[name] for name in (*inside, row)))
        others = [name for name in self._others if is_inside(name, [home]) and name in read]
        if not Flow(self._block, home)._is_closed(inside, others, row):
            return None
        columns = tuple(name for name in inside if self._readers(name) == {row} and name in layers)
        latent = tuple(name for name in inside if name not in columns)
        return Region(columns, row, home, reads_home=True, latent=latent, others=tuple(others)) if columns else None

    def _readers(self, layer: str) -> set[str]:
        return {name for name, sources in self.feeds.items() if layer in sources}

    def _is_read_by(self, columns: Collection[str]) -> bool:
        """Whether the input of `home` leads to these layers alone, and not, as a residual, out of it beside them."""
        return " home" not in self.returned and self._readers(" home") <= set(columns)

    def _is_closed(self, inside: Collection[str], others: Collection[str], row: str) -> bool:
        """Whether what is inside of `home` comes from its input and parameters alone, and leads to the row alone."""
        own = {*inside, *others, " home"}
        comes = set().union(*(self.feeds[name] for name in (*inside, row)))
        leads = set().union(self.returned, *(self.feeds[name] for name in self.feeds.keys() - {*inside, row}))
        return comes <= own and not leads & own


def _around(names: Iterable[str]) -> str:
    """The innermost module around some layers."""
    parts = [name.split(".")[:-1] for name in names]
    depth = next((i for i, same in enumerate(zip(*parts, strict=False)) if len(set(same)) > 1), min(map(len, parts)))
    return ".".join(parts[0][:depth])
