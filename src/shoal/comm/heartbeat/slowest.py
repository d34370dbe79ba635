"""The rank that the others wait for, as metrics and the summary of a run have it. Without torch, for readers of both.

Ranks that are late in turns have none: each of them costs something, and one of them always costs most. So a reader
names a rank only if it `stands_out`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.comm.heartbeat.arrivals import Straggler

FIELDS = ("rank", "late_seconds", "cost_fraction", "stands_out")
"""Of a `Straggler`: those that metrics have."""
METRICS = tuple(f"straggler_{name}" for name in FIELDS)
"""Their keys in metrics."""


@dataclass(frozen=True, slots=True)
class Slowest:
    """The rank that costs most."""

    rank: int
    late_seconds: float
    """NaN: not known."""
    cost_fraction: float
    stands_out: bool
    """Whether it costs more than twice as much as any other rank; only then is it to blame."""


def to_metrics(found: Straggler) -> dict[str, Any]:
    """The values of `METRICS`."""
    return {f"straggler_{name}": getattr(found, name) for name in FIELDS}


def of_metrics(record: Mapping[str, Any]) -> Slowest | None:
    """The slowest rank of one record of metrics; None: the record has none, or values that no run writes.

    >>> of_metrics({"straggler_rank": 1, "straggler_cost_fraction": 0.2, "straggler_stands_out": True}).rank
    1
    """
    return of_summary({name: record.get(key) for name, key in zip(FIELDS, METRICS, strict=True)})


def of_summary(found: Any) -> Slowest | None:
    """The slowest rank of `straggler` in a summary, which may come from a stranger."""
    if not isinstance(found, Mapping):
        return None
    rank, late, cost = (_number(found.get(name)) for name in FIELDS[:3])
    if not (rank >= 0 and rank.is_integer() and 0 <= cost <= 1):
        return None
    return Slowest(int(rank), late, cost, found.get("stands_out") is True)


def _number(value: Any) -> float:
    """A finite number; NaN: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**53:
        return math.nan
    return float(value)
