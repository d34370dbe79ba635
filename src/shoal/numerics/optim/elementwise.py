"""Whether an optimizer updates every element of a tensor by itself, so that it may update pieces of tensors.

Adam does. Muon orthogonalizes whole matrices, Adafactor averages whole rows, LAMB divides by the norm of a tensor. With
a piece of a tensor in place of the tensor they compute other updates, without an error. shoal's own Muon, LAMB and LARS
know the shards of `zero`, which are DTensors, and put them together; they do not know the pieces of tp and ep.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from shoal.numerics.optim.adamw import AdamW as OwnAdamW
from shoal.numerics.optim.layerwise import LAMB, LARS
from shoal.numerics.optim.lion import Lion
from shoal.numerics.optim.muon import Muon

ELEMENTWISE = (Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD, OwnAdamW, Lion)
JOINS_SHARDS = (Muon, LAMB, LARS)
SIZE = 8
STEPS = 2


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it updates the halves of a matrix as it updates the matrix. A class that is not known is tried on a small
    matrix, with the options of each group; one that cannot be tried is not elementwise, as far as is known."""
    if type(optimizer) in ELEMENTWISE:
        return True
    return not joins_shards(optimizer) and all(_is_elementwise(optimizer, group) for group in optimizer.param_groups)


def joins_shards(optimizer: Optimizer) -> bool:
    """Whether it is right with DTensors, although it reads whole tensors."""
    return type(optimizer) in JOINS_SHARDS


def _is_elementwise(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + STEPS, SIZE, SIZE, generator=generator, dtype=torch.float64)
    try:
        whole = _updated(optimizer, group, start, gradients, dim=0, pieces=1)
        halves = [_updated(optimizer, group, start, gradients, dim=dim, pieces=2) for dim in (0, 1)]
    except Exception:  # of the optimizer of a script, which may need more than a gradient
        return False
    return all(torch.allclose(half, whole) for half in halves)


def _updated(
    optimizer: Optimizer, group: dict[str, Any], start: Tensor, gradients: list[Tensor], *, dim: int, pieces: int
) -> Tensor:
    """A matrix after some steps of an optimizer like this one, as pieces along a dim."""
    weights = [nn.Parameter(piece.clone()) for piece in start.chunk(pieces, dim)]
    other = _without_state(optimizer, group, weights)
    for gradient in gradients:
        for weight, piece in zip(weights, gradient.chunk(pieces, dim), strict=True):
            weight.grad = piece.clone()
        other.step()
    return torch.cat([weight.detach() for weight in weights], dim)


def _without_state(optimizer: Optimizer, group: dict[str, Any], weights: list[nn.Parameter]) -> Optimizer:
    """An optimizer with the options of a group and no hooks, for other parameters."""
    other = copy.copy(optimizer)
    own = {name: value for name, value in optimizer.__dict__.items() if name not in ("param_groups", "state")}
    hooks = {name: type(value)() for name, value in own.items() if name.endswith("_hooks")}
    other.__dict__ = {**own, **hooks, "state": defaultdict(dict)}
    modes = {"train_mode": True} if "train_mode" in group else {}  # of the library schedulefree
    other.param_groups = [{**group, **modes, "lr": 0.1, "params": weights}]
    return other
