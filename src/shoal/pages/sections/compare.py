"""Several runs side by side: their figures, and the settings that differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.pages.html import section, table, text
from shoal.pages.run.metrics_table import number
from shoal.pages.run.read_run import RunRecord
from shoal.pages.run.verdict import facts, verdict_of
from shoal.pages.sections.profile import parts_of
from shoal.pages.words import duration, percent

UNLIKE = ("run.dir", "run.name", "checkpoint.dir")
"""Settings that differ between any two runs, and explain nothing."""
MOST_ROWS = 300


def figures(runs: Sequence[RunRecord]) -> str:
    """The verdicts and figures of all runs."""
    found = [{name: f"{value} ({remark})" for name, value, remark in facts(run)} for run in runs]
    names = list(dict.fromkeys(name for each in found for name in each))
    rows = [["", *(verdict_of(run).headline for run in runs)]]
    rows += [[name, *(each.get(name, "–") for each in found)] for name in names]
    rows += [["Ranks", *(_ranks(run) for run in runs)], ["Plan", *(_plan(run) for run in runs)]]
    keys = "".join(
        f'<li><i class="line c{number % 6}"></i><bdi>{text(run.name, 80)}</bdi></li>' for number, run in enumerate(runs)
    )
    head = ("", *(run.name[:80] for run in runs))
    return section("Side by side", f'<ul class="keys">{keys}</ul>{table(head, rows, kind="compare")}', name="compare")


def differences(runs: Sequence[RunRecord]) -> str:
    """The settings that are not the same in all recipes."""
    flat = [dict(_flat(run.recipe)) for run in runs]
    names = list(dict.fromkeys(name for each in flat for name in each))
    rows = [
        [name, *(each.get(name, "–") for each in flat)]
        for name in names
        if name not in UNLIKE and len({each.get(name, "–") for each in flat}) > 1
    ]
    body = table(("setting", *(run.name[:80] for run in runs)), rows[:MOST_ROWS], kind="compare")
    body = body or '<p class="note">All settings are equal.</p>'
    return section("Differences of the recipes", body, name="differences")


def profiles(runs: Sequence[RunRecord]) -> str:
    """The parts of a step of all runs that were profiled; empty: fewer than two were."""
    found = [(run, parts_of(run)) for run in runs]
    found = [(run, parts) for run, parts in found if parts]
    if len(found) < 2:
        return ""
    names = list(dict.fromkeys(name for _, parts in found for name in parts))
    rows = [[name, *(_part(parts, name) for _, parts in found)] for name in names]
    rows.append(["step", *(duration(sum(parts.values())) for _, parts in found)])
    rows.append(["verdict", *(_verdict(run) for run, _ in found)])
    body = table(("part of a step", *(run.name[:80] for run, _ in found)), rows, kind="compare")
    return section("Profiles", body, name="profiles", note="Measured; the mean over steps and ranks.")


def _part(parts: Mapping[str, float], name: str) -> str:
    return f"{duration(parts[name])}, {percent(parts[name] / (sum(parts.values()) or 1.0))}" if name in parts else "–"


def _verdict(run: RunRecord) -> str:
    verdict = run.profile.get("verdict")
    return str(verdict.get("title") or "–") if isinstance(verdict, dict) else "–"


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _flat(part, f"{prefix}.{key}" if prefix else str(key)[:80])
    else:
        yield prefix, "none" if value is None else str(value)[:200]


def _ranks(run: RunRecord) -> str:
    known = number(run.summary.get("ranks"))
    if known > 0:
        return f"{known:,.0f}"
    return f"{run.layout.world_size:,}" if run.layout is not None else "–"


def _plan(run: RunRecord) -> str:
    return run.plan.brief() if run.plan is not None else "–"
