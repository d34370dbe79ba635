"""The local shard of a DTensor, without importing DTensor.

A model has DTensors or FSDP2 modules only if torch's packages for them were imported, which takes 0.7 s. Code that
handles both kinds of model looks in `sys.modules`, so that plans without shards start without these packages.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(value, package.DTensor)


def is_fsdp(module: object) -> TypeGuard[FSDPModule]:
    """Whether `fully_shard` was applied to a module."""
    package = sys.modules.get("torch.distributed.fsdp")
    return package is not None and isinstance(module, package.FSDPModule)


def to_local(tensor: Tensor) -> Tensor:
    """Return the shard of a tensor on this rank; changing it changes the tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a parameter's gradient; zeros if it has none."""
    return to_local(parameter.grad) if parameter.grad is not None else torch.zeros_like(to_local(parameter))
