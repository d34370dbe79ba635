"""Build a configuration from the keys of a recipe, and layers without initial values from a configuration.

A configuration is a frozen dataclass whose `__post_init__` rejects invalid numbers. This file adds what all models
share: presets with overrides, checks of names and types, and layers without initial values. torch's layers draw their
weights when they are built. Here `numerics.init` does that later, by the name of each weight, so drawing them twice
would only cost time.
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
from shoal.errors import Problem, ShoalError, listed, nearest, raise_if

Config = TypeVar("Config")
Layer = TypeVar("Layer", bound=nn.Module)


def uninitialized(kind: type[Layer], *arguments: Any, **options: Any) -> Layer:
    """A layer on the default device without initial values: its parameters are NaN, and not arbitrary memory."""
    device = torch.get_default_device()
    if device.type == "meta":
        return kind(*arguments, **options)
    layer: Layer = skip_init(kind, *arguments, device=device, **options)
    return with_nan_weights(layer)


def with_nan_weights(layer: Layer) -> Layer:
    """Replace the initial values of a layer by NaN."""
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)
    return layer


def build_config(model: str, presets: Mapping[str, Config], default: Config, arguments: Mapping[str, Any]) -> Config:
    """The preset in `arguments` (or the default) with all other arguments as fields."""
    overrides = dict(arguments)
    preset = overrides.pop("preset", None)
    hints = get_type_hints(type(default))
    problems = [] if preset is None or preset in presets else [_unknown_preset(str(preset), presets)]
    problems += [_unknown_setting(name, value, hints) for name, value in overrides.items() if name not in hints]
    for name in overrides.keys() & hints.keys():
        try:
            overrides[name] = _fitted(overrides[name], hints[name])
        except ValueError:
            what = f"{name} must be {_in_words(hints[name])}, got {overrides[name]!r}"
            problems.append(Problem("M007", what, f"--model.{name} {getattr(default, name)}"))
    problems += check_bounds(overrides.items())
    base: Any = presets.get(preset, default) if isinstance(preset, str) else default
    if problems:
        problems += _of_single_fields(base, {name: value for name, value in overrides.items() if name in hints})
    raise_if(sorted(set(problems), key=str), title=f"model {model!r}")
    changed: Config = dataclasses.replace(base, **overrides)  # rejects invalid combinations
    return changed


def _of_single_fields(base: Any, overrides: Mapping[str, Any]) -> list[Problem]:
    """Problems of values by themselves. Whether they fit each other is not known while others are wrong."""
    found = []
    for name, value in overrides.items():
        try:
            dataclasses.replace(base, **{name: value})
        except ShoalError as error:
            found += [problem for problem in error.problems if problem.code == "M008"]
        except TypeError:  # a value of another type, which is reported as such
            continue
    return found


def not_positive(config: Any, *names: str) -> list[Problem]:
    """A problem for each named field that is zero or less."""
    values = ((name, getattr(config, name)) for name in names)
    return [
        Problem("M008", f"{name} must be above 0, got {value}", f"--model.{name} 1")
        for name, value in values
        if not value > 0
    ]


def _unknown_preset(word: str, known: Mapping[str, Any]) -> Problem:
    return Problem("M006", f"unknown preset {word!r}", f"--model.preset {nearest(word, known) or listed(known)}")


def _unknown_setting(name: str, value: Any, known: Mapping[str, Any]) -> Problem:
    fix = f"--model.{close} {value}" if (close := nearest(name, known)) else f"one of --model.{listed(known)}"
    return Problem("M006", f"unknown setting {name!r}", fix)


def _fitted(value: Any, hint: Any) -> Any:
    """Convert `value` to the type `hint`, or raise ValueError. YAML has no tuples and reads 1e-5 as text, so lists and
    numerals are accepted."""
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
    return {int: "an integer", float: "a number", bool: "true or false", str: "a word"}[hint]
