"""Parameters outside of linear layers with a number for each head, as attention sinks: tp cuts them alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from shoal.blueprint.description import Description
from shoal.parallel.tensor_parts.packed import cut


def cut_parameters(module: nn.Module, name: str, description: Description, tensor: Any) -> None:
    """Replace the parameters inside a module that `Description.cuts` names, and that no layer has cut, by pieces."""
    for own, parameter in list(module.named_parameters(prefix=name)):
        dim = description.cut_of(own)
        if dim is None or own in tensor.cuts:
            continue
        piece = cut(parameter.detach(), dim, (), index=tensor.index, degree=tensor.degree)
        holder, _, last = own.removeprefix(f"{name}.").rpartition(".")
        setattr(module.get_submodule(holder), last, nn.Parameter(piece, requires_grad=parameter.requires_grad))
        tensor.cuts[own] = dim
        tensor.partial.discard(own)
