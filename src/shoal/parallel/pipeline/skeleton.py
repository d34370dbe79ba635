"""Models and tensors with shapes and without values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments with which the model is called for one microbatch."""


def skeleton_of(model: nn.Module) -> nn.Module:
    """Copy a model with shapes and without values."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        there = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
    return copy.deepcopy(model, memo)
