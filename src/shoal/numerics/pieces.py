"""What of a sharded tensor is here."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The piece of a tensor that this rank holds; changing it changes the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of a parameter's gradient; zeros, where it has none."""
    return local(parameter.grad) if parameter.grad is not None else torch.zeros_like(local(parameter))
