"""A parameter of a split layer that has a second name in a module around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn


def share_pieces(
    model: nn.Module, names: Iterable[str], pieces: Mapping[nn.Parameter, nn.Parameter], cuts: dict[str, int]
) -> None:
    """Replace a parameter by its piece there, too."""
    for name in names:
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            for own, parameter in list(module.named_parameters(recurse=False)):
                if parameter in pieces:
                    setattr(module, own, pieces[parameter])
                    cuts[f"{inner}.{own}"] = 0  # only a vocabulary has two names
