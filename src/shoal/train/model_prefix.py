"""Functions for models that are named by a prefix, such as `hf:FOLDER`. Strings only, as for all models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from shoal.config.recipe import ModelSection


def function_for(table: str, name: str) -> Callable[..., Any] | None:
    """The function that a table of `shoal.models` has for the prefix of a name; None: it has none."""
    places: dict[str, str] = getattr(importlib.import_module("shoal.models"), table)
    for prefix, place in places.items():
        if name.startswith(prefix):
            module_name, _, function = place.partition(":")
            found: Callable[..., Any] = getattr(importlib.import_module(module_name), function)
            return found
    return None


def value_for(table: str, section: ModelSection) -> str | None:
    """The value of that function for a model section; None: there is no function, or no value."""
    function = function_for(table, section.name)
    value: str | None = None if function is None else function(section.name, **section.arguments)
    return value
