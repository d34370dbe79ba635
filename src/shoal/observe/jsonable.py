"""Records as JSON. It needs no torch, so that a command that only coordinates can print a summary at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def jsonable(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with NaN and infinity as strings, since JSON has no such numbers.

    >>> jsonable({"step": 1, "loss": float("nan"), "rows": [{"loss": float("inf")}]})
    {'step': 1, 'loss': 'nan', 'rows': [{'loss': 'inf'}]}
    """
    return {name: _value(value) for name, value in record.items()}


def _value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return jsonable(value)
    return [_value(each) for each in value] if isinstance(value, list | tuple) else value
