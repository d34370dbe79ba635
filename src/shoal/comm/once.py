"""Gradients of gradients, which functions of ours do not have.

Autograd would take a backward that writes in place, calls a kernel or talks to other ranks for one that has no
derivative, without a word: the gradient of a gradient would be a wrong number.
"""

from __future__ import annotations

import torch

from shoal.errors import ShoalError


def differentiable_once() -> None:
    """To be called by the backward of a `torch.autograd.Function`: refuses to be differentiated itself."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the compiler refuses by itself
        raise ShoalError(
            "a gradient of a gradient (create_graph=True) is asked for, which shoal's layers and losses do not have",
            fix="a model of torch's own layers, without a fused loss (fused_loss=False), on one device",
        )
