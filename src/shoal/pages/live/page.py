"""The live page: the page of a report with the present above it, or a page that waits for a run to begin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.pages.html import CHARTS, page, policy, text
from shoal.pages.live.follow import Cursor
from shoal.pages.live.now import now_of
from shoal.pages.report import report_body, title_of
from shoal.pages.run.own_files import tail_records
from shoal.pages.run.read_run import is_run, read_run
from shoal.pages.sections import top

SCRIPTS = (*CHARTS, "live.js")
POLICY = f"{policy(SCRIPTS, is_live=True)}; frame-ancestors 'none'"
RELOADS = '<noscript><meta http-equiv="refresh" content="10"></noscript>'
STATES = {
    "running": "running: this page follows it",
    "ended": "the run has ended",
    "stopped": "a signal has stopped the run",
    "dead": "no process trains this run",
    "silent": "silent: whether this run of another host still trains is seen there alone",
}


def live_page(path: Path, *, is_copy: bool = False) -> str:
    """The page of a run as it is now; a copy has no server to follow."""
    cursor = Cursor.at_end(path / "metrics.jsonl")  # before the records are read: rows may be sent twice, never lost
    if not is_run(path):
        return _waiting(path)
    run = read_run(path)
    body, found = report_body([run])
    title = title_of([run])
    state = STATES[run.state]
    figures = now_of(tail_records(path / "metrics.jsonl"), run.recipe).words()
    figures = figures if run.state == "running" else []
    if is_copy:
        strip = _strip(f"{run.state}: a copy of this page at one moment, which no longer changes", figures)
        return page(title, top.header([run], "watch") + strip + body, found)
    found["live"] = {"cursor": str(cursor), "state": state, "title": f"{title} – shoal watch"}
    strip = _strip(state, figures)
    return page(title, RELOADS + top.header([run], "watch") + strip + body, found, scripts=SCRIPTS, is_live=True)


def _waiting(path: Path) -> str:
    """The page of a run that is not there yet."""
    state = "waiting for the run to begin"
    found = {"runs": [], "charts": [], "unit": "tokens", "live": {"cursor": "", "state": state, "title": "shoal watch"}}
    head = f'<header><p class="brand">shoal watch</p><h1><bdi>{text(path, 200)}</bdi></h1></header>'
    note = '<p class="note">This directory holds no run yet. The page changes when it does.</p>'
    return page("shoal watch", RELOADS + head + _strip(state, ()) + note, found, scripts=SCRIPTS, is_live=True)


def _strip(state: str, figures: Sequence[tuple[str, str, str]]) -> str:
    """The state, and the figures of the present."""
    cards = "".join(
        f'<div class="fact"><dt>{text(name)}</dt><dd>{text(value)}</dd><dd class="remark">{text(remark)}</dd></div>'
        for name, value, remark in figures
    )
    cards = f'<dl class="facts">{cards}</dl>' if cards else ""
    return f'<section id="live"><p id="live-state">{text(state)}</p>{cards}</section>'
