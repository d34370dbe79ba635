"""Helpers for every `torch.autograd.Function` of shoal: no second derivative, and outputs that the compiler keeps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from shoal.errors import ShoalError

LOSES_GRADIENTS = TorchVersion(torch.__version__) < "2.13"


def differentiable_once() -> None:
    """Reject a second derivative; the backward of a `torch.autograd.Function` calls this.

    Autograd treats a backward that writes in place, calls a kernel or sends messages as one without a derivative, and
    would return a wrong number."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the compiler rejects it by itself
        raise ShoalError(
            "create_graph=True needs a second derivative, which shoal's layers and losses do not have",
            fix="fused_loss=False and fused_layers=False, on one device, with a model of torch's own layers",
            code="T038",
        )


def as_output(x: Tensor) -> Tensor:
    """Return a tensor that the forward of a `torch.autograd.Function` may return.

    The compiler of torch 2.11 silently loses the gradient of an output that comes from an operation which returned its
    own argument. Such an operation wrote in place, as collectives do, or was a no-op, as `.to` of the same dtype and
    `.contiguous()`."""
    return x.clone() if LOSES_GRADIENTS and torch.compiler.is_compiling() else x
