"""What functions of ours do for torch.compile, where a torch that is still supported gets their gradients wrong."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

LOSES_GRADIENTS = TorchVersion(torch.__version__) < "2.13"


def as_output(x: Tensor) -> Tensor:
    """What the forward of a `torch.autograd.Function` may return: the compiler of torch 2.11 loses, without a word, the
    gradient of an output that comes from an operation which returned its own argument. That is one that has written in
    place, as collectives do, or one that had nothing to do, as `.to` of the same dtype and `.contiguous()`."""
    return x.clone() if LOSES_GRADIENTS and torch.compiler.is_compiling() else x
