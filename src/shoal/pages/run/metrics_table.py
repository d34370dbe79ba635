"""The metrics of a run as columns: one row per logged step, sorted by step, NaN where a value is missing."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

COLUMNS = (
    *("loss", "grad_norm", "lr", "tokens", "step_seconds", "data_wait_seconds", "tokens_per_s", "mfu", "memory_gib"),
    *("comm_seconds", "comm_overlap_fraction", "straggler_rank", "straggler_late_seconds", "straggler_cost_fraction"),
    *("expert_load_max", "expert_dropped_fraction", "auxiliary_loss", "loss_scale"),
)
"""Keys that are read; docs/metrics.md says what they are."""
MOST_STEPS = 2_000_000
"""Rows that are kept."""


@dataclass
class MetricsTable:
    """Columns of equal length, and the evaluations beside them."""

    steps: list[int] = field(default_factory=list)
    columns: dict[str, array[float]] = field(default_factory=dict)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    """Steps whose update was skipped."""

    def column(self, name: str) -> Sequence[float]:
        """The values of a key, one per step."""
        return self.columns.get(name) or array("d", [math.nan]) * len(self.steps)

    def last(self, name: str) -> float | None:
        """The last finite value of a key; None: there is none."""
        return next((value for value in reversed(self.column(name)) if math.isfinite(value)), None)

    def first(self, name: str) -> float | None:
        """The first finite value of a key; None: there is none."""
        return next((value for value in self.column(name) if math.isfinite(value)), None)

    def finite(self, name: str, start: int = 0) -> list[float]:
        """The finite values of a key from a row on."""
        return [value for value in self.column(name)[start:] if math.isfinite(value)]

    @property
    def warmup(self) -> int:
        """The number of first rows that speed leaves out: they include allocation and compilation."""
        return len(self.steps) // 5


def make_table(records: Iterable[Mapping[str, Any]]) -> MetricsTable:
    """The columns of records. Of several records of one step, the last counts."""
    rows: dict[int, Mapping[str, Any]] = {}
    evaluations: dict[int, float] = {}
    for record in records:
        step = record["step"]
        if "eval_loss" in record:
            evaluations[step] = number(record["eval_loss"])
        elif len(rows) < MOST_STEPS:
            rows[step] = record
    table = MetricsTable(sorted(rows), evaluations=sorted(evaluations.items()))
    ordered = [rows[step] for step in table.steps]
    for name in COLUMNS:
        values = [row.get(name) for row in ordered]
        if any(value is not None for value in values):
            table.columns[name] = _column(values)
    table.skipped = [row["step"] for row in ordered if row.get("skipped") is True]
    return table


def _column(values: list[Any]) -> array[float]:
    """The numbers of a column; the usual one has floats alone, which is fast."""
    if all(type(value) is float for value in values):
        return array("d", values)
    return array("d", map(number, values))


def number(value: Any) -> float:
    """A number of a record; NaN if it is none. Infinity and NaN are written as strings.

    >>> number(2), number("inf"), number("<b>"), number(True)
    (2.0, inf, nan, nan)
    """
    if isinstance(value, bool):
        return math.nan
    if isinstance(value, str):
        value = {"inf": math.inf, "-inf": -math.inf}.get(value, math.nan)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
