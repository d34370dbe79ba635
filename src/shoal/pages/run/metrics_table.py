"""The metrics of a run as columns: one row per logged step, sorted by step, NaN where a value is missing."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from operator import itemgetter, lt
from types import NoneType
from typing import Any

from shoal.blueprint.layout import GROUP_AXES

COLUMNS = (
    *("loss", "grad_norm", "lr", "tokens", "step_seconds", "data_wait_seconds", "tokens_per_s", "mfu", "memory_gib"),
    *("comm_seconds", "comm_overlap_fraction", "expert_load_max", "expert_dropped_fraction", "auxiliary_loss"),
    "loss_scale",
    *(f"{key}_{axis}" for axis in GROUP_AXES for key in ("comm_seconds", "comm_overlap_fraction")),
)
"""Keys that are read; docs/metrics.md says what they are."""
TOGETHER = 4_000
"""Records that are held at once."""
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
    not_finite: list[int] = field(default_factory=list)
    """Steps whose loss is not finite."""
    straggler: Mapping[str, Any] = field(default_factory=dict)
    """The last record with a straggler."""
    sampled: str = ""
    """How a file was read that is too long to be read whole; empty: all of it was."""

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
        values = self.column(name)[start:]
        return list(values) if are_finite(values) else [value for value in values if math.isfinite(value)]

    def seconds(self) -> list[float]:
        """Seconds of training until each row. Not every step has a row: those before it count as long as it."""
        gaps = [after - before for before, after in zip([0, *self.steps], self.steps, strict=False)]
        pairs = zip(self.column("step_seconds"), gaps, strict=True)
        return list(accumulate(each * gap if 0 <= each < math.inf else 0.0 for each, gap in pairs))

    @property
    def warmup(self) -> int:
        """The number of first rows that speed leaves out: they include allocation and compilation."""
        return len(self.steps) // 5


def make_table(records: Iterable[Mapping[str, Any]]) -> MetricsTable:
    """The columns of records. Of several records of one step, the last counts."""
    table, known = MetricsTable(columns={name: array("d") for name in COLUMNS}), set[str]()
    evaluations: dict[int, float] = {}
    ahead = iter(records)
    while chunk := list(islice(ahead, TOGETHER)):
        evaluations |= {row["step"]: number(row["eval_loss"]) for row in chunk if "eval_loss" in row}
        rows = [row for row in chunk if "eval_loss" not in row][: MOST_STEPS - len(table.steps)]
        table.steps += [row["step"] for row in rows]
        table.skipped += [row["step"] for row in rows if row.get("skipped") is True]
        present = set(chain.from_iterable(rows))
        if "straggler_rank" in present:
            table.straggler = next(row for row in reversed(rows) if "straggler_rank" in row)
        for name in COLUMNS:
            values = _values(rows, name) if name in present else []
            if set(map(type, values)) - {NoneType}:
                known.add(name)
                table.columns[name].extend(_column(values))
            else:
                table.columns[name].extend(array("d", [math.nan]) * len(rows))
    table.columns = {name: values for name, values in table.columns.items() if name in known}
    table.evaluations = sorted(evaluations.items())
    _sort(table)
    if not are_finite(losses := table.columns.get("loss", array("d"))):
        table.not_finite = [step for step, loss in zip(table.steps, losses, strict=True) if not math.isfinite(loss)]
    return table


def _sort(table: MetricsTable) -> None:
    """Bring rows into the order of their steps, each step once; those of a sound run are."""
    if all(map(lt, table.steps, table.steps[1:])):
        return
    last = sorted({step: row for row, step in enumerate(table.steps)}.items())
    table.steps = [step for step, _ in last]
    table.columns = {name: array("d", [values[row] for _, row in last]) for name, values in table.columns.items()}
    table.skipped = sorted(set(table.skipped))


def _values(rows: list[Mapping[str, Any]], name: str) -> list[Any]:
    """The values of a key; the usual key is in every row, which is fast."""
    try:
        return list(map(itemgetter(name), rows))
    except KeyError:
        return [row.get(name) for row in rows]


def _column(values: list[Any]) -> array[float]:
    """The numbers of a column; the usual one has plain numbers alone, which is fast."""
    try:
        return array("d", values if set(map(type, values)) <= {float, int} else map(number, values))
    except OverflowError:  # a whole number that no float can hold
        return array("d", map(number, values))


def unit_of(recipe: Mapping[str, Any], step: int, tokens: float) -> str:
    """What a run counts, before its summary says so: a sample that counts once is no text.

    >>> unit_of({"data": {"global_batch": 8}}, 10, 80), unit_of({"data": {"global_batch": 8}}, 10, 5120)
    ('samples', 'tokens')
    """
    section = recipe.get("data")
    batch = number(section.get("global_batch")) if isinstance(section, dict) else math.nan
    return "samples" if step > 0 and tokens == step * batch else "tokens"


def are_finite(values: Sequence[float]) -> bool:
    """Whether all values are finite, at the speed of a sum. Values whose sum is too large for a float may be missed.

    >>> are_finite([1.0, 2.0]), are_finite([1.0, math.nan]), are_finite([math.inf, -math.inf])
    (True, False, False)
    """
    return math.isfinite(sum(values))


def loss_of(record: Mapping[str, Any], key: str) -> float | None:
    """A loss of a record or a summary, which may be NaN; None: it has none.

    >>> loss_of({"loss": 2.5}, "loss"), loss_of({"loss": "nan"}, "loss"), loss_of({}, "loss")
    (2.5, nan, None)
    """
    value = record.get(key)
    found = number(value)
    return None if math.isnan(found) and value != "nan" else found


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
