"""What every `torch.autograd.Function` of shoal needs: no second derivative, and outputs that the compiler keeps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from shoal.errors import ShoalError

LOSES_GRADIENTS = TorchVersion(torch.__version__) < "2.13"


def differentiable_once() -> None:
    """Reject a second derivative; to be called by the backward of a `torch.autograd.Function`.

    Autograd would take a backward that writes in place, calls a kernel or sends messages for one without a derivative,
    and return a wrong number."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the compiler rejects it by itself
        raise ShoalError(
            "a gradient of a gradient (create_graph=True) is asked for, which shoal's layers and losses do not have",
            fix="a model of torch's own layers, without a fused loss (fused_loss=False), on one device",
        )


def as_output(x: Tensor) -> Tensor:
    """What the forward of a `torch.autograd.Function` may return: the compiler of torch 2.11 loses, without a word, the
    gradient of an output that comes from an operation which returned its own argument. That is one that has written in
    place, as collectives do, or one that had nothing to do, as `.to` of the same dtype and `.contiguous()`."""
    return x.clone() if LOSES_GRADIENTS and torch.compiler.is_compiling() else x
