"""Records as JSON. It needs no torch, so that a command that only coordinates can print a summary at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def jsonable(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with NaN and infinity as strings, since JSON has no such numbers.

    >>> jsonable({"step": 1, "loss": float("nan")})
    {'step': 1, 'loss': 'nan'}
    """
    return {n: str(v) if isinstance(v, float) and not math.isfinite(v) else v for n, v in record.items()}
