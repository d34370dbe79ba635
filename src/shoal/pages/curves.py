"""Curves of a run for the page: at most 5,000 points each, the lowest and the highest of every stretch among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from shoal.pages import svg
from shoal.pages.html import text
from shoal.pages.run.metrics_table import MetricsTable, are_finite
from shoal.pages.run.read_run import RunRecord
from shoal.pages.words import figure

MOST_POINTS = 5_000
"""Of one curve."""
MOST_ON_PAGE = 20_000
"""Of one key over all runs."""
MOST_TICKS = 1_000
"""Points that map a step to tokens and time."""
FALLBACK_POINTS = 400


class Chart(NamedTuple):
    """A chart of the page."""

    key: str
    title: str
    unit: str


SPEED = Chart("tokens_per_s", "Speed", "per second")
CHARTS = (
    Chart("loss", "Loss", "nats"),
    SPEED,
    Chart("lr", "Learning rate", ""),
    Chart("grad_norm", "Gradient norm", "before clipping"),
    Chart("memory_gib", "Memory", "GiB, peak so far on rank 0"),
    Chart("mfu", "MFU", "of the datasheet's peak"),
    Chart("expert_load_max", "Busiest expert", "times the mean load"),
    Chart("expert_dropped_fraction", "Dropped choices of experts", "fraction"),
)
"""In the order of the page; one without values is left out."""


def downsample(steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS) -> tuple[list[int], list[float]]:
    """At most `most` points: the first lowest and the first highest of each stretch, in order. A stretch without a
    finite value keeps one point, so a gap stays a gap."""
    count = len(steps)
    if count <= most:
        return list(steps), list(values)
    kept: list[int] = []
    buckets = most // 2
    for bucket in range(buckets):
        start, stop = count * bucket // buckets, count * (bucket + 1) // buckets
        stretch = values[start:stop]
        finite = stretch if are_finite(stretch) else [value for value in stretch if math.isfinite(value)]
        if finite:
            kept += sorted({start + stretch.index(min(finite)), start + stretch.index(max(finite))})
        else:
            kept.append(start)
    return [steps[row] for row in kept], [values[row] for row in kept]


def payload(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """The data of the page's charts. `unit`: that of the axis of tokens or samples; empty: there is no such axis."""
    most = min(MOST_POINTS, MOST_ON_PAGE // len(runs))
    found = [_of_run(run, most) for run in runs]
    units = list(dict.fromkeys(run.unit for run in runs if run.metrics.steps))
    charts = list(CHARTS)
    if len(units) > 1:  # samples and tokens share no axis, and no chart of speed
        at = charts.index(SPEED)
        charts[at : at + 1] = [Chart(f"{unit}_per_s", SPEED.title, f"{unit} per second") for unit in units]
        for run, each in zip(runs, found, strict=True):
            if SPEED.key in each["curves"]:
                each["curves"][f"{run.unit}_per_s"] = each["curves"].pop(SPEED.key)
    used = [chart for chart in charts if any(chart.key in run["curves"] for run in found)]
    unit = units[0] if len(units) == 1 else ""
    return {"runs": found, "charts": [chart._asdict() for chart in used], "unit": unit}


def _of_run(run: RunRecord, most: int) -> dict[str, Any]:
    table, curves = run.metrics, {}
    for chart in CHARTS:
        values = table.column(chart.key)
        if chart.key in table.columns and any(map(math.isfinite, values)):
            curves[chart.key] = _rounded(*downsample(table.steps, values, most))
    if known := [pair for pair in table.evaluations if math.isfinite(pair[1])]:
        curves["eval_loss"] = _rounded(*downsample([step for step, _ in known], [loss for _, loss in known], most))
    return {"name": run.name[:80], "curves": curves, "axis": _axis(table)}


def _rounded(steps: list[int], values: list[float]) -> list[list[Any]]:
    return [steps, [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]]


def _axis(table: MetricsTable) -> dict[str, list[float]]:
    """Steps, and the tokens and seconds of training at each: the page interpolates between them."""
    rows = range(0, len(table.steps), max(1, len(table.steps) // MOST_TICKS))
    seconds = table.seconds()
    tokens = table.column("tokens")
    rows = [*rows, len(table.steps) - 1] if table.steps else []  # type: ignore[assignment]
    return {
        "step": [table.steps[row] for row in rows],
        "tokens": [tokens[row] if math.isfinite(tokens[row]) else table.steps[row] for row in rows],
        "seconds": [round(seconds[row], 3) for row in rows],
    }


def charts(runs: Sequence[RunRecord], found: dict[str, Any]) -> str:
    """The charts as HTML: a drawing of each, which the script of the page replaces."""
    cards = []
    for chart in found["charts"]:
        lines = [_points(run["curves"].get(chart["key"])) for run in found["runs"]]
        if chart["key"] == "loss":
            lines += [_points(run["curves"].get("eval_loss")) for run in found["runs"]]
        drawn = [y for line in lines for _, y in line if y is not None]
        ticks = (figure(min(drawn)), figure(max(drawn))) if drawn else ("", "")
        wide = " wide-card" if chart["key"] == "loss" else ""
        cards.append(
            f'<figure class="card{wide}"><figcaption>{text(chart["title"])} <small>{text(chart["unit"])}</small>'
            f'</figcaption><div class="chart" data-key="{chart["key"]}">{svg.curves(lines, chart["title"], ticks)}'
            "</div></figure>"
        )
    return f'<div class="charts">{"".join(cards)}</div>' if cards else ""


def _points(curve: list[list[Any]] | None) -> list[tuple[float, float | None]]:
    if curve is None:
        return []
    steps, values = downsample(curve[0], [math.nan if y is None else y for y in curve[1]], FALLBACK_POINTS)
    return [(x, y if math.isfinite(y) else None) for x, y in zip(steps, values, strict=True)]
