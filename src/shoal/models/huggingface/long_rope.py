"""Rotary frequencies that depend on the length of a sequence, where a rank has some of its tokens.

transformers chooses them by the largest position that it sees: `longrope` (Phi-3.5) has others for sequences that are
longer than those of its first training, `dynamic` has others for each length. So under cp ranks would rotate by
different frequencies. Each rank passes the last position of the sequence beside its own, and drops the result for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

BY_LENGTH = ("dynamic", "longrope")
REMEMBERS = "dynamic"
"""The type that keeps the longest sequence seen, as a tensor, and compares others with it."""


def rotary_of(model: nn.Module, *kinds: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that compute rotary positions of these types, of one layer type or several."""
    for name, module in model.named_modules():
        said = getattr(module, "rope_type", None)
        found = said.values() if isinstance(said, dict) else (said,)
        if any(kind in found for kind in kinds):
            yield name, module


def pass_last_position(model: nn.Module, cp: int) -> None:
    """Let every rank of cp choose the frequencies by the length of the whole sequence."""
    for _, module in rotary_of(model, *BY_LENGTH):
        module.register_forward_pre_hook(_WithLast(cp), with_kwargs=True)
        module.register_forward_hook(_without_last)


@dataclass(frozen=True)
class _WithLast:
    cp: int

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if "position_ids" in options:
            return arguments, {**options, "position_ids": self._with_last(options["position_ids"])}
        x, positions, *others = arguments
        return (x, self._with_last(positions), *others), options

    def _with_last(self, positions: Tensor) -> Tensor:
        last = positions.new_full((*positions.shape[:-1], 1), positions.shape[-1] * self.cp - 1)
        return torch.cat([positions, last], -1)


def _without_last(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
    return tree_map_only(Tensor, lambda angles: angles[..., :-1, :], output)
