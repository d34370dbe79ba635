"""Models and tensors with shapes and without values."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments with which the model is called for one microbatch."""


def skeleton_of(model: nn.Module) -> nn.Module:
    """Copy a model with shapes and without values."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        there = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
    memo |= {id(tensor): torch.empty_like(tensor, device="meta") for tensor in results_in(model)}
    return copy.deepcopy(model, memo)


def results_in(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that a forward has left in attributes of modules, as a state for the next one. While they have a history
    they cannot be copied."""
    for module in model.modules():
        yield from (one for one in vars(module).values() if isinstance(one, Tensor) and not one.is_leaf)
