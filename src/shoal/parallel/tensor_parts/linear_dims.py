"""Recognise a linear layer by what it computes: x Wᵀ + b, as nn.Linear, or x W + b, as Conv1D of GPT-2."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUTS = 3
"""Input features of the copy that is tried: large layers cost as little as small ones."""
TOLERANCE = 1e-12


class LinearDims(NamedTuple):
    """Dims of the weight of a linear layer."""

    outputs: int
    inputs: int


PLAIN, TRANSPOSED = LinearDims(0, 1), LinearDims(1, 0)


def linear_dims(module: Any) -> LinearDims | None:
    """The dims of a layer's weight; None: it is no linear layer, or has more parameters than a weight and a bias. A
    layer with LoRA says them."""
    if type(module) is nn.Linear:
        return PLAIN
    if isinstance(known := getattr(module, "weight_dims", None), LinearDims):
        return known
    own = dict(module.named_parameters(recurse=False))
    is_alike = own.keys() <= {"weight", "bias"} and "weight" in own and own["weight"].dim() == 2
    if not is_alike or next(module.children(), None) is not None or "forward" in vars(module):
        return None
    return next((dims for dims in (PLAIN, TRANSPOSED) if _computes(module, dims)), None)


def _computes(module: Any, dims: LinearDims) -> bool:
    """Whether a copy with few inputs and random numbers computes a product with its weight."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")

    weight = drawn(module.weight.shape[dims.outputs], INPUTS)
    bias = None if getattr(module, "bias", None) is None else drawn(weight.shape[0])
    small, x = copy.copy(module), drawn(1, 2, INPUTS)
    stored = nn.Parameter(weight if dims is PLAIN else weight.T.contiguous())
    small._parameters = {"weight": stored, "bias": None if bias is None else nn.Parameter(bias)}
    try:
        with torch.no_grad():
            found = type(module).forward(small, x)
    except Exception:  # it takes other arguments, or is made for other sizes
        return False
    expected = F.linear(x, weight, bias)
    is_like = isinstance(found, Tensor) and found.shape == expected.shape
    return is_like and bool((found - expected).norm() <= TOLERANCE * expected.norm())
