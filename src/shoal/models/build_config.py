"""From the keys of a recipe to a configuration, and from a configuration to layers without values.

A configuration is a frozen dataclass whose `__post_init__` refuses impossible numbers. This file adds what all models
share: a preset with some fields overridden, names that are spelled wrong, values of the wrong type, and layers whose
weights nobody has drawn. torch's layers draw their weights when they are made; here `numerics.init` does that later,
from the name of each weight, so drawing them twice would only cost time.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.nn.utils import skip_init

from shoal.blueprint.validation.bounds import check_bounds
from shoal.errors import Problem, listed, nearest, raise_if

Config = TypeVar("Config")
Layer = TypeVar("Layer", bound=nn.Module)


def uninitialized(kind: type[Layer], *arguments: Any, **options: Any) -> Layer:
    """A layer on the default device whose parameters nobody has drawn: they are no numbers, and not what happened to be
    in memory."""
    device = torch.get_default_device()
    if device.type == "meta":
        return kind(*arguments, **options)
    layer: Layer = skip_init(kind, *arguments, device=device, **options)
    return with_nan_weights(layer)


def with_nan_weights(layer: Layer) -> Layer:
    """A layer of ours, which has drawn its parameters when it was made, without them."""
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)
    return layer


def build_config(model: str, presets: Mapping[str, Config], default: Config, arguments: Mapping[str, Any]) -> Config:
    """The preset that `arguments` names (or the default) with every other argument as a field of it."""
    overrides = dict(arguments)
    preset = overrides.pop("preset", None)
    hints = get_type_hints(type(default))
    problems = [] if preset is None or preset in presets else [_unknown("preset", str(preset), presets)]
    problems += [_unknown("setting", name, hints) for name in overrides if name not in hints]
    for name in overrides.keys() & hints.keys():
        try:
            overrides[name] = _fitted(overrides[name], hints[name])
        except ValueError:
            problems.append(Problem(f"{name} is {overrides[name]!r}", f"{name}: {_in_words(hints[name])}"))
    problems += check_bounds(overrides.items())
    raise_if(sorted(problems, key=str), title=f"model {model!r}")
    base: Any = default if preset is None else presets[preset]
    changed: Config = dataclasses.replace(base, **overrides)  # refuses numbers that do not go together
    return changed


def not_positive(config: Any, *names: str) -> list[Problem]:
    """A problem for each named field that is zero or less."""
    values = ((name, getattr(config, name)) for name in names)
    return [Problem(f"{name} is {value}", f"{name} above 0") for name, value in values if not value > 0]


def _unknown(kind: str, word: str, known: Mapping[str, Any]) -> Problem:
    close = nearest(word, known)
    hint = f"{close} (known: {', '.join(known)})" if close else listed(known)
    return Problem(f"there is no {kind} {word!r}", hint)


def _fitted(value: Any, hint: Any) -> Any:
    """`value` as a `hint`, or ValueError. YAML knows no tuples and reads 1e-5 as text, so lists and numerals are let
    in."""
    if isinstance(hint, types.UnionType):
        return None if value is None else _fitted(value, get_args(hint)[0])
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_fitted(item, get_args(hint)[0]) for item in value)
    if hint in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        number = float(value)
        if hint is int and not number.is_integer():
            raise ValueError(value)
        return int(number) if hint is int else number
    if hint in (bool, str) and isinstance(value, hint):
        return value
    raise ValueError(value)


def _in_words(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return f"{_in_words(get_args(hint)[0])}, or null"
    if get_origin(hint) is tuple:
        return "a list, each " + _in_words(get_args(hint)[0])
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}[hint]
