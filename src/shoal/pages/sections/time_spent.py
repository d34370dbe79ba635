"""Where the time of a run is spent, and which ranks are slow."""

from __future__ import annotations

import math
import statistics

from shoal.pages.html import section, text
from shoal.pages.run.findings import WORTH
from shoal.pages.run.metrics_table import number
from shoal.pages.run.read_run import RunRecord
from shoal.pages.run.time_parts import TimeParts, hidden_by_axis, over_time, whole_run
from shoal.pages.svg import heat_map, stacked_bar, stacked_columns
from shoal.pages.words import duration, percent

NAMES = {"data": "waiting for data", "comm": "communication, not hidden", "other": "computation and other"}
LATEST = 1.5
"""A step of a rank that takes this many times the median has the darkest shade."""


def time_spent(run: RunRecord) -> str:
    """A bar of the whole run, and a column for each stretch of it."""
    parts = whole_run(run.metrics)
    if parts is None:
        return ""
    named = [(kind, f"{NAMES[kind]}: {percent(part)}", part) for kind, part in _parts(parts)]
    keys = "".join(
        f'<li><i class="{kind}"></i>{text(NAMES[kind])} <b>{percent(part)}</b></li>' for kind, part in _parts(parts)
    )
    hidden = ""
    if parts.comm_hidden is not None:
        hidden = f"Communication beside computation, which costs no time of its own: {percent(parts.comm_hidden)}."
        if by_axis := hidden_by_axis(run.metrics):
            words = (f"{axis} {percent(part)} of {duration(seconds)}" for axis, (seconds, part) in by_axis.items())
            hidden += f" Hidden by axis: {', '.join(words)} a step."
    elif run.layout is not None and run.layout.world_size > 1:
        is_timed = any(name.startswith("comm_seconds") for name in run.metrics.columns)
        where = "was timed in its first fifth alone" if is_timed else "was not timed under this plan"
        hidden = f"Communication {where}: it is part of computation and other."
    note = f"Measured on rank 0 over steps {parts.first:,} to {parts.last:,}, without the first fifth. {hidden}"
    slow = run.slowest
    if slow is not None and slow.rank == 0 and slow.stands_out and slow.cost_fraction >= WORTH:
        note += f" This is the time of rank 0: the other ranks wait for it {percent(slow.cost_fraction)} of theirs."
    columns = [
        (
            f"steps {each.first:,} to {each.last:,}: "
            + ", ".join(f"{NAMES[kind]} {percent(part)}" for kind, part in _parts(each)),
            _parts(each),
        )
        for each in over_time(run.metrics)
    ]
    over = stacked_columns(columns)
    over = f'<p class="note">over the run, from its first step to its last</p>{over}' if over else ""
    return section(
        "Where the time goes", f'{stacked_bar(named)}<ul class="keys">{keys}</ul>{over}', name="time", note=note
    )


def _parts(parts: TimeParts) -> list[tuple[str, float]]:
    comm = [("comm", parts.comm)] if parts.comm is not None else []
    return [("other", parts.other), *comm, ("data", parts.data)]


def ranks(run: RunRecord) -> str:
    """Ranks over time, where each rank has written its own metrics: dark is slow."""
    rows = {rank: _by_step(records) for rank, records in run.ranks.items()}
    found = [seconds for row in rows.values() for seconds in row.values()]
    if len(rows) < 2 or not found:
        return ""
    middle = statistics.median(found)
    first, last = (pick(step for row in rows.values() for step in row) for pick in (min, max))
    number_of_cells = min(60, max(len(row) for row in rows.values()))
    lines = [(str(rank), _cells(row, first, last, number_of_cells, middle)) for rank, row in rows.items()]
    note = (
        f"Time of a step on each of {len(rows)} ranks, steps {first:,} to {last:,}, sampled. Light: the median of"
        f" {duration(middle)}; dark: {LATEST:g} times it or more. Ranks that synchronize at every step take equal"
        " time: the one that is waited for is named by the straggler below."
    )
    return section(
        "Ranks over time", heat_map(lines, "seconds of a step by rank") + _slowest(run), name="ranks", note=note
    )


def _slowest(run: RunRecord) -> str:
    found = run.slowest
    if found is None:
        return '<p class="note">No straggler was measured.</p>'
    cost = f"{percent(found.cost_fraction)} of the time"
    if found.stands_out:
        return f'<p class="note">Straggler: rank {found.rank}, for which the others wait {cost}.</p>'
    costly = f"the one that costs most is rank {found.rank}, with {cost}"
    return f'<p class="note">No rank stands out: ranks are late in turns, and {costly}.</p>'


def _by_step(records: list[dict[str, object]]) -> dict[int, float]:
    pairs = ((record["step"], number(record.get("step_seconds"))) for record in records)
    return {step: value for step, value in pairs if isinstance(step, int) and 0 < value < math.inf}


def _cells(row: dict[int, float], first: int, last: int, cells: int, middle: float) -> list[float | None]:
    """One value for each cell: 0 at the median, 1 at `LATEST` times it."""
    found: list[float | None] = [None] * cells
    for step, seconds in row.items():
        cell = min(cells - 1, (step - first) * cells // max(1, last - first + 1))
        value = max(0.0, (seconds / middle - 1) / (LATEST - 1))
        found[cell] = max(value, found[cell] or 0.0)
    return found
