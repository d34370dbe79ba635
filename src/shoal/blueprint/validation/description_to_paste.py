"""A description as code to paste: what is known of a model, for its author to complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from enum import Enum

from shoal.blueprint.description import Description, Split

_LEFT_OUT = ("why_not", "training_flops", "costs")
"""Reasons, a function, and numbers that are only as good as the order of the blocks."""
_NOTES = {
    "splits": "  # a divided part begins with Split.COLUMN and ends with Split.ROW; SEQUENCE is whole on every rank"
}
_INDENT = " " * 8


def as_code(description: Description, layers: Iterable[str]) -> str:
    """Python that gives `model` this description. `layers`: patterns of modules with parameters; one without a split
    gets the split that leaves it whole.

    >>> print(as_code(Description(blocks=("layers.0", "layers.1"), head="out"), ["out"]))
    from shoal import Description, Split
            model.describe = lambda: Description(
                blocks=tuple(f"layers.{i}" for i in range(2)),
                splits={
                    "out": Split.SEQUENCE,
                },  # a divided part begins with Split.COLUMN and ends with Split.ROW; SEQUENCE is whole on every rank
                head="out",
            )
    """
    splits = {**dict.fromkeys(layers, Split.SEQUENCE), **description.splits}
    lines = ["from shoal import Description, Split", "model.describe = lambda: Description("]
    for one in fields(Description):
        value = splits if one.name == "splits" else getattr(description, one.name)
        if one.name not in _LEFT_OUT and value != _default(one):
            lines.append(f"    {one.name}={_written(value)},{_NOTES.get(one.name, '')}")
    return f"\n{_INDENT}".join([*lines, ")"])


def _default(one: Field[object]) -> object:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _written(value: object) -> str:
    if isinstance(value, Mapping) and value:
        rows = "".join(f"\n{_INDENT}        {_written(key)}: {_written(one)}," for key, one in value.items())
        return f"{{{rows}\n{_INDENT}    }}"
    if isinstance(value, tuple):
        return _numbered(value) or f"({', '.join(map(_written, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _numbered(names: Sequence[object]) -> str | None:
    """A generator for names that differ by their last number alone, which counts from 0."""
    prefix, _, last = str(names[0]).rpartition(".") if names else ("", "", "")
    if last != "0" or len(names) < 2 or list(names) != [f"{prefix}.{i}" for i in range(len(names))]:
        return None
    return f'tuple(f"{prefix}.{{i}}" for i in range({len(names)}))'
