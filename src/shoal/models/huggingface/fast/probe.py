"""Compare a module with a formula on random numbers in float64, forward and every gradient.

A module is recognised by what it computes, not by its class. The probe computes on a copy with few features, so that
large models, and models without memory, are probed alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.numerics.ops.memory_saving_linear import has_hooks, is_plain
from shoal.verification.exact_casts import keeping_float64

TOLERANCE = 1e-12


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers on the host."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu")


def small_copy(module: nn.Module, sizes: Mapping[str, tuple[int, int]] | None = None) -> Any:
    """Copy a module with random numbers: the linear layers of these names with these (inputs, outputs), all other
    tensors in their shapes."""
    memo: dict[int, Any] = {}
    sizes = sizes or {}
    config = getattr(module, "config", None)
    if config is not None:
        memo[id(config)] = copy.copy(config)
    for name, (inputs, outputs) in sizes.items():
        layer = getattr(module, name)
        small = nn.Linear(inputs, outputs, bias=layer.bias is not None, dtype=torch.float64, device="meta")
        small.to_empty(device="cpu")
        memo[id(layer)] = small
    layers = {id(getattr(module, name)) for name in sizes}
    for inner in module.modules():
        if id(inner) not in layers:
            tensors = (*inner.parameters(recurse=False), *inner.buffers(recurse=False))
            memo |= {id(one): _empty_like(one) for one in tensors if id(one) not in memo}
    found = copy.deepcopy(module, memo)
    for seed, tensor in enumerate((*found.parameters(), *found.buffers())):
        if tensor.is_floating_point():
            tensor.data.copy_(drawn(*tensor.shape, seed=seed + 1))
    return found


def _empty_like(tensor: Tensor) -> Tensor:
    dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
    there = torch.zeros(tensor.shape, dtype=dtype, device="cpu")
    return nn.Parameter(there) if isinstance(tensor, nn.Parameter) else there


FAR = 1e4
"""Inputs are also tried this many times as large: a limit that a module clamps its values to is then passed."""


def computes(
    module: nn.Module,
    theirs: Callable[..., Any],
    ours: Callable[..., Any],
    *inputs: Tensor,
    modes: Sequence[bool] = (True, False),
) -> bool:
    """Whether both functions return the same tensors and the same gradients of the inputs and of all parameters of the
    module, while it trains and while it does not."""
    parameters = [one for one in module.parameters() if one.is_floating_point()]
    for is_training in modes:
        module.train(is_training)
        found, expected = (_evaluated(one, parameters, inputs) for one in (ours, theirs))
        if found is None or expected is None or len(found) != len(expected):
            return False
        if not all(map(_is_same, found, expected)):
            return False
    return True


def _evaluated(
    function: Callable[..., Any], parameters: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Any] | None:
    """The outputs, and the gradients of a sum over them with random weights."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    try:
        with keeping_float64("fp64", is_foreign=True), torch.enable_grad():
            outputs = function(*leaves)
            outputs = [outputs] if isinstance(outputs, Tensor) else [one for one in outputs if isinstance(one, Tensor)]
            total = sum((one * drawn(*one.shape, seed=99 + n)).sum() for n, one in enumerate(outputs))
            gradients = torch.autograd.grad(total, [*leaves, *parameters], allow_unused=True)
    except Exception:  # it takes other arguments, or is made for other sizes
        return None
    return [*outputs, *gradients]


def _is_same(found: Tensor | None, expected: Tensor | None) -> bool:
    if found is None or expected is None:
        return found is expected
    if found.shape != expected.shape:
        return False
    return bool((found - expected).norm() <= TOLERANCE * expected.norm())


def has_linears(module: nn.Module, names: Sequence[str], kinds: Sequence[type] = (nn.Linear,)) -> bool:
    """Whether a module has layers of these names that are exactly of one of these kinds, without hooks."""
    layers = [getattr(module, name, None) for name in names]
    return all(isinstance(layer, nn.Module) and type(layer) in kinds and is_plain(layer) for layer in layers)


def become(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Let a module compute as the mixin says. Its class is a new one that inherits from its own, with the same names
    and parameters."""
    kind = type(module)
    module.__class__ = _kinds.setdefault(
        (kind, mixin), type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
    )
    for name, value in attributes.items():
        setattr(module, name, value)


_kinds: dict[tuple[type, type], type] = {}


def is_free(module: nn.Module) -> bool:
    """Whether a module has no hooks and no forward of its own, and was not swapped before."""
    return "forward" not in module.__dict__ and not has_hooks(module) and not isinstance(module, Swapped)


class Swapped:
    """Marks a module that computes as one of the mixins of this folder says."""
