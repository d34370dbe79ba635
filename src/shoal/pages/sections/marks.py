"""Starts, restarts, faults and saves of a run, with their reasons: marks on the charts, and a table."""

from __future__ import annotations

import time
from typing import Any

from shoal.pages.html import details, section, table
from shoal.pages.run.metrics_table import number
from shoal.pages.run.read_run import RunRecord

KINDS = ("started", "resumed", "saved", "not saved", "failed", "stopped", "ended")
MOST_SAVES = 60
"""Saves that are drawn; of more, evenly spaced ones."""
MOST_ROWS = 200


def marks(run: RunRecord) -> list[dict[str, Any]]:
    """The marks of a run in the order of events: kind, step, and a reason."""
    found = [
        {
            "step": event["step"],
            "kind": event["event"],
            "reason": str(event.get("reason") or "")[:1500],
            "time": event.get("time"),
        }
        for event in run.events
        if event.get("event") in KINDS
    ]
    if not any(mark["kind"] == "saved" for mark in found):  # the run had no events: the checkpoints that are left
        found += [{"step": step, "kind": "saved", "reason": "", "time": None} for step in run.saved_steps]
    found += [
        {"step": step, "kind": "skipped", "reason": "a gradient was not finite", "time": None}
        for step in run.metrics.skipped[:MOST_ROWS]
    ]
    return found


def drawn(run: RunRecord) -> list[dict[str, Any]]:
    """The marks on the charts."""
    found = marks(run)
    saves = [mark for mark in found if mark["kind"] == "saved"]
    others = [mark for mark in found if mark["kind"] in ("resumed", "failed", "not saved", "stopped", "skipped")]
    every = max(1, -(-len(saves) // MOST_SAVES))
    kept = [*saves[::every], *others[:MOST_ROWS]]
    return [
        {key: mark[key][:200] if key == "reason" else mark[key] for key in ("step", "kind", "reason")} for mark in kept
    ]


def history(run: RunRecord) -> str:
    """The marks as tables: saves apart, since there are many."""
    found = marks(run)
    saves = [mark for mark in found if mark["kind"] == "saved"]
    others = [mark for mark in found if mark["kind"] != "saved"][-MOST_ROWS:]
    head = ("step", "event", "when", "reason")
    body = table(head, [_row(mark) for mark in others], kind="events")
    if saves:
        title = f"{len(saves)} saves, the last at step {saves[-1]['step']:,}" if len(saves) > 1 else "1 save"
        body += details(title, table(head[:3], [_row(mark)[:3] for mark in saves[-MOST_ROWS:]]))
    return section("Restarts, faults and saves", body, name="history")


def _row(mark: dict[str, Any]) -> tuple[str, str, str, str]:
    return f"{mark['step']:,}", mark["kind"], _when(mark["time"]), mark["reason"]


def _when(value: Any) -> str:
    seconds = number(value)
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if 0 < seconds < 1e11 else ""
