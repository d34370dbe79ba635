"""Arguments of a module by their names, however a caller passes them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

FIRST = "hidden_states"
"""The argument with the activations, where a caller passes none by position."""


def names_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of its forward, in order."""
    return tuple(inspect.signature(module.forward).parameters)


def by_name(names: Sequence[str], arguments: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call.

    >>> by_name(("x", "mask"), (1,), {"mask": 2})
    {'x': 1, 'mask': 2}
    """
    return dict(zip(names, arguments, strict=False)) | dict(options)


def changed(
    names: Sequence[str], arguments: Sequence[Any], options: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with other values of some arguments.

    >>> changed(("x", "mask"), (1,), {"mask": 2}, {"x": 3, "mask": 4})
    ((3,), {'mask': 4})
    """
    positional = [new.get(name, value) for name, value in zip(names, arguments, strict=False)]
    rest = arguments[len(positional) :]  # of a forward that takes *args
    return (*positional, *rest), {name: new.get(name, value) for name, value in options.items()}


def first_of(names: Sequence[str], arguments: Sequence[Any]) -> str:
    """The name of the argument with the activations."""
    return names[0] if arguments else FIRST
