"""Where the time of a step is spent, as far as metrics know: data, communication, computation and the rest.

The parts add to 1 by construction. Only communication that is not overlapped with computation counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from shoal.blueprint.layout import GROUP_AXES
from shoal.pages.run.metrics_table import MetricsTable, are_finite


@dataclass(frozen=True)
class TimeParts:
    """Fractions of the time of the steps."""

    data: float
    """Waiting for data."""
    comm: float | None
    """Communication that nothing hides; None: it was not timed."""
    comm_hidden: float | None
    """Communication beside computation, which costs no time of its own."""
    first: int = 0
    last: int = 0
    """The steps that they are measured over."""

    @property
    def other(self) -> float:
        """Computation, and all that is not timed."""
        return max(0.0, 1.0 - self.data - (self.comm or 0.0))


def time_parts(table: MetricsTable, start: int, stop: int) -> TimeParts | None:
    """The parts over the rows from `start` to `stop`; None: no step has a time."""
    seconds, waited = table.column("step_seconds")[start:stop], table.column("data_wait_seconds")[start:stop]
    if not (are_finite(seconds) and are_finite(waited) and min(seconds, default=0.0) > 0):  # the usual ones are fast
        timed = [(s, w if math.isfinite(w) else 0.0) for s, w in zip(seconds, waited, strict=True) if 0 < s < math.inf]
        seconds, waited = [s for s, _ in timed], [w for _, w in timed]
    if not seconds:
        return None
    total = sum(seconds)
    data = min(1.0, max(0.0, sum(waited)) / total)
    exposed, hidden = _communication(table, start, stop, total / len(seconds))
    exposed = None if exposed is None else min(exposed, 1.0 - data)
    return TimeParts(data, exposed, hidden, table.steps[start], table.steps[stop - 1])


def _communication(table: MetricsTable, start: int, stop: int, mean: float) -> tuple[float | None, float | None]:
    """The exposed and the hidden fraction: not every step is timed, so means are compared."""
    every = [_seconds(table, f"_{axis}", start, stop) for axis in GROUP_AXES]
    if not any(every):  # an older run: that of replicas alone
        every = [_seconds(table, "", start, stop)]
    known = [each for each in every if each is not None]
    if not known:
        return None, None
    seconds, exposed = (sum(column) for column in zip(*known, strict=True))
    return min(1.0, exposed / mean), min(1.0, (seconds - exposed) / mean)


def _seconds(table: MetricsTable, axis: str, start: int, stop: int) -> tuple[float, float] | None:
    """Seconds of a step in which an axis communicates, and those that nothing hides; None: none was timed."""
    if f"comm_seconds{axis}" not in table.columns:
        return None
    if not (pairs := list(_timed(table, axis, start, stop))):
        return None
    return sum(s for s, _ in pairs) / len(pairs), sum(s * (1 - o) for s, o in pairs) / len(pairs)


def _timed(table: MetricsTable, axis: str, start: int, stop: int) -> Iterator[tuple[float, float]]:
    """Seconds and hidden fraction of each step that has timed an axis."""
    columns = table.column(f"comm_seconds{axis}")[start:stop], table.column(f"comm_overlap_fraction{axis}")[start:stop]
    return ((s, o) for s, o in zip(*columns, strict=True) if 0 <= s < math.inf and 0 <= o <= 1)


def hidden_by_axis(table: MetricsTable) -> dict[str, tuple[float, float]]:
    """Axis → seconds of a step in which it communicates, and the hidden fraction of them, without the first fifth; the
    axis that communicates longest comes first."""
    every = {axis: _seconds(table, f"_{axis}", table.warmup, len(table.steps)) for axis in GROUP_AXES}
    known = {axis: each for axis, each in every.items() if each is not None and each[0] > 0}
    return {axis: (s, 1 - exposed / s) for axis, (s, exposed) in sorted(known.items(), key=lambda one: -one[1][0])}


def whole_run(table: MetricsTable) -> TimeParts | None:
    """The parts over the run without its first fifth."""
    return time_parts(table, table.warmup, len(table.steps)) if table.steps else None


def over_time(table: MetricsTable, number: int = 48) -> list[TimeParts]:
    """The parts of consecutive stretches of the run. Not every step times its communication, so a stretch reaches as
    far as to a step that does: without one, it would look as if nothing was sent."""
    rows = len(table.steps)
    number = min(number, rows // 5)
    edges = [rows * index // number for index in range(number + 1)] if number > 1 else []
    if _has_timed(table, 0, rows):
        edges = [0, *(stop for start, stop in pairwise(edges) if _has_timed(table, start, stop))]
        edges[-1] = rows
    found = (time_parts(table, start, stop) for start, stop in pairwise(edges))
    return [parts for parts in found if parts is not None]


def _has_timed(table: MetricsTable, start: int, stop: int) -> bool:
    """Whether a step between two rows has timed its communication, of any axis."""
    known = [axis for axis in ("", *(f"_{each}" for each in GROUP_AXES)) if f"comm_seconds{axis}" in table.columns]
    return any(True for axis in known for _ in _timed(table, axis, start, stop))
