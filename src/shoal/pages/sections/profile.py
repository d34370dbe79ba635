"""The profile of a run, where it has made one: its verdict, the parts of a step, and the rest of it."""

from __future__ import annotations

import math
from typing import Any

from shoal.observe.profile.words import spoken
from shoal.pages.html import section, table, text
from shoal.pages.parts_bar import parts_bar
from shoal.pages.run.metrics_table import number
from shoal.pages.run.read_run import RunRecord
from shoal.pages.sections.profile_details import details_of, summary_of
from shoal.pages.words import duration, percent

MOST_PARTS = 60


def profile(run: RunRecord) -> str:
    """The section; empty without a profile."""
    parts = _parts(run)
    if not parts:
        return ""
    sizes = parts_of(run)
    predicted = any(_predicted(each) is not None for each in parts)
    rows = [_row(each, sum(sizes.values()), is_predicted=predicted) for each in parts]
    before = [_predicted(each) or 0.0 for each in parts]
    rows.append(("step", duration(sum(sizes.values())), "100 %", *([duration(sum(before))] if predicted else [])))
    head = ("part", "measured", "of a step", *(["predicted"] if predicted else []))
    steps = text(summary_of(run.profile))
    note = f"Measured over {steps}. <code>shoal profile</code> and <code>run.profile</code> make it."
    body = _verdict(run.profile.get("verdict")) + parts_bar("a step", sizes, duration) + table(head, rows, kind="bench")
    body += details_of(run.profile)
    return section("Profile", body, name="profile", note=note)


def parts_of(run: RunRecord) -> dict[str, float]:
    """The parts of a step in words, in seconds."""
    return {spoken(str(each.get("part"))[:60]): _seconds(each) or 0.0 for each in _parts(run)}


def _parts(run: RunRecord) -> list[dict[str, Any]]:
    return [each for each in _list(run.profile.get("parts"))[:MOST_PARTS] if _seconds(each) is not None]


def _verdict(found: Any) -> str:
    if not isinstance(found, dict):
        return ""
    what, why, fix = (text(found.get(key) or "") for key in ("title", "evidence", "next"))
    return f'<ol class="findings"><li><strong>{what}</strong><span>{why}</span><em>{fix}</em></li></ol>'


def _row(part: dict[str, Any], total: float, *, is_predicted: bool) -> tuple[str, ...]:
    seconds, predicted = _seconds(part) or 0.0, _predicted(part)
    last = (duration(predicted),) if is_predicted else ()
    return spoken(str(part.get("part"))[:60]), duration(seconds), percent(seconds / (total or 1.0)), *last


def _seconds(part: Any) -> float | None:
    seconds = number(part.get("seconds")) if isinstance(part, dict) else math.nan
    return seconds if 0 <= seconds < math.inf else None


def _predicted(part: dict[str, Any]) -> float | None:
    seconds = number(part.get("predicted_seconds"))
    return seconds if 0 <= seconds < math.inf else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
