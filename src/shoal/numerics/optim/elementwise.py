"""Whether an optimizer updates every element of a tensor by itself, so that it may update pieces of tensors.

Adam does. Muon orthogonalizes whole matrices, Adafactor averages whole rows, LAMB divides by the norm of a tensor. With
a piece of a tensor in place of the tensor they compute other updates, without an error.
"""

from __future__ import annotations

import copy
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from shoal.numerics.optim.adamw import AdamW as OwnAdamW
from shoal.numerics.optim.lion import Lion

ELEMENTWISE = (Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD, OwnAdamW, Lion)
SIZE = 8
STEPS = 2


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it updates the halves of a matrix as it updates the matrix. A class that is not known is tried on a small
    matrix; one that cannot be tried is not elementwise, as far as is known."""
    if type(optimizer) in ELEMENTWISE:
        return True
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + STEPS, SIZE, SIZE, generator=generator, dtype=torch.float64)
    try:
        whole = _updated(optimizer, start, gradients, dim=0, pieces=1)
        return all(torch.allclose(_updated(optimizer, start, gradients, dim=dim, pieces=2), whole) for dim in (0, 1))
    except Exception:  # of the optimizer of a script, which may need more than a gradient
        return False


def _updated(optimizer: Optimizer, start: Tensor, gradients: list[Tensor], *, dim: int, pieces: int) -> Tensor:
    """A matrix after some steps of an optimizer like this one, as pieces along a dim."""
    weights = [nn.Parameter(piece.clone()) for piece in start.chunk(pieces, dim)]
    other = _without_state(optimizer, weights)
    for gradient in gradients:
        for weight, piece in zip(weights, gradient.chunk(pieces, dim), strict=True):
            weight.grad = piece.clone()
        other.step()
    return torch.cat([weight.detach() for weight in weights], dim)


def _without_state(optimizer: Optimizer, weights: list[nn.Parameter]) -> Optimizer:
    """An optimizer with the options of the first group and no hooks, for other parameters."""
    other = copy.copy(optimizer)
    own = {name: value for name, value in optimizer.__dict__.items() if name not in ("param_groups", "state")}
    hooks = {name: type(value)() for name, value in own.items() if name.endswith("_hooks")}
    other.__dict__ = {**own, **hooks, "state": defaultdict(dict)}
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    other.param_groups = [{**group, "lr": 0.1, "params": weights}]
    return other
