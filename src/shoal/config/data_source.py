"""`data.source`: one source, or several with weights.

source: corpus/                                     one source
source: {corpus/: 0.7, chat.jsonl: 0.3}             several, with their weights
source:                                             the same, with room for settings of one source
  - {source: corpus/, weight: 0.7}
  - {source: rows.jsonl, weight: 0.3, text_field: body}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, ValidationError, WithJsonSchema

from shoal.config.fields import Section
from shoal.errors import Findings, Problem, ShoalError, nearest
from shoal.safe_parsing import short

Format = Literal["auto", "text", "jsonl", "chat", "tokens", "parquet", "images", "classes", "pairs"]


class WeightedSource(Section):
    """One source of a mixture, and how often it is drawn."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True)

    source: str
    """As `data.source` of a single one."""

    weight: float
    """Its share of the samples is this, divided by the sum of all weights."""

    format: Format | None = None
    """None: as `data.format`."""

    text_field: str | None = None
    """None: as `data.text_field`."""


def _parse(value: Any) -> Any:
    """A text, or sources with weights; raises all problems at once."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        value = [{"source": name, "weight": weight} for name, weight in value.items()]
    if not isinstance(value, list | tuple):
        what = f"it must be text, or sources with weights, got {short(value)}"
        raise ShoalError(what, fix="--data.source '{corpus/: 0.7, chat.jsonl: 0.3}'", code="D080")
    found, fix = Findings(), _fix(value)
    read = [each for number, row in enumerate(value) if (each := found.of(_row, row, f"source {number + 1}", fix))]
    if len(value) < 2:
        found += [Problem("D080", f"a mixture must have at least two sources, got {len(value)}", fix)]
    names = [each.source for each in read]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        what = f"each source must be given once, got {name!r} {names.count(name)} times"
        found += [Problem("D082", what, f"--data.source with one entry for {name}, and the sum of the weights")]
    found.raise_all()
    return tuple(read)


def _row(row: Any, place: str, fix: str) -> WeightedSource:
    if isinstance(row, WeightedSource):
        row = row.model_dump()
    if not isinstance(row, Mapping) or not {"source", "weight"} <= row.keys():
        raise ShoalError(f"{place} must have a source and a weight, got {short(row)}", fix=fix, code="D080")
    if not _is_weight(weight := row["weight"]):
        what = f"the weight of {short(row['source'])} must be a number greater than 0, got {short(weight)}"
        raise ShoalError(what, fix=f"{fix}; or leave the source out", code="D081")
    try:
        return WeightedSource.model_validate({**row, "weight": float(weight)})
    except ValidationError as error:
        first = error.errors()[0]
        key, is_unknown = str(first["loc"][0]), first["type"] == "extra_forbidden"
        meant = nearest(key, WeightedSource.model_fields) if is_unknown else None
        rule = "unknown key" if is_unknown else first["msg"].replace("Input should ", "it must ", 1)
        what = f"{place}: {key}: {rule}, got {short(first['input'])}"
        keys = meant or ", ".join(WeightedSource.model_fields)
        raise ShoalError(what, fix=f"--data.source with the keys {keys}", code="D080") from None


def _is_weight(weight: Any) -> bool:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < math.inf


def _fix(rows: Sequence[Any]) -> str:
    """The sources as they are typed, with 1 in place of weights that are missing or wrong."""
    others = ["PATH", "OTHER"][-max(0, 2 - len(rows)) :] if len(rows) < 2 else []
    pairs = [
        (row.get("source"), row.get("weight")) if isinstance(row, Mapping) else (row, 1) for row in [*rows, *others]
    ]
    words = ", ".join(f"{short(name).strip(chr(39))}: {weight if _is_weight(weight) else 1}" for name, weight in pairs)
    return f"--data.source '{{{words}}}'"


def spelled(source: str | tuple[WeightedSource, ...]) -> str:
    """The source in a message.

    >>> spelled("corpus/"), spelled((WeightedSource(source="a", weight=3), WeightedSource(source="b", weight=1)))
    ("'corpus/'", "'a' (3) and 'b' (1)")
    """
    if isinstance(source, str):
        return repr(source)
    return " and ".join(f"{one.source!r} ({one.weight:g})" for one in source)


SourceField = Annotated[
    str | tuple[WeightedSource, ...],
    BeforeValidator(_parse),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "object", "additionalProperties": {"type": "number", "exclusiveMinimum": 0}},
                {"type": "array", "items": WeightedSource.model_json_schema()},
            ]
        }
    ),
]
