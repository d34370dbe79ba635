"""What of a sharded tensor is here."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The piece of a tensor that this rank holds; changing it changes the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
