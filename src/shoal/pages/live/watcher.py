"""The messages to an open page: new rows, and that sections or the whole page have to be loaded again.

rows      figures of the present, and the new points of the curves
refresh   fetch the page again, and take its sections
again     load the page again: the run began, ended, was resumed, or was replaced
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.pages.curves import CHARTS
from shoal.pages.live.follow import Cursor, Follower
from shoal.pages.live.now import now_of
from shoal.pages.run.metrics_table import number
from shoal.pages.run.own_files import Record, read_object, tail_records
from shoal.pages.run.read_run import is_run, read_recipe
from shoal.pages.run.state import state_of

LOOK_EVERY = 2.0
"""Seconds between two looks at the lock and at the events."""
REFRESH_EVERY = 10.0
"""Seconds, at least, between two refreshes of the sections."""
SHARE = 200
"""A refresh is at least this many times its own cost after the one before it: it costs half a hundredth of a core."""
AXES = ("tokens", "step_seconds")
"""Columns that place a step on the axes of tokens and of time."""
KEEP = 200
"""Records for the present."""


@dataclass(frozen=True)
class Message:
    """One message to the page."""

    event: str
    data: Any = None
    id: str = ""


class Watcher:
    """Looks at the files of a run for one open page. It holds no lock and writes nothing."""

    def __init__(
        self, path: Path, cursor: Cursor, cost: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`cost`: the seconds of processor time that the last page has cost."""
        self._path, self._cost, self._clock = path, cost, clock
        self._metrics = Follower(path / "metrics.jsonl", cursor)
        self._last: deque[Record] = deque(tail_records(path / "metrics.jsonl"), maxlen=KEEP)
        self._began = is_run(path)
        self._recipe = read_recipe(path) if self._began else {}
        self._environment = read_object(path / "environment.json")
        self._seen = self._look() if self._began else None
        self._events = _size(path / "events.jsonl")
        self._looked = self._refreshed = clock()
        self._is_stale = False

    def poll(self) -> list[Message]:
        """The messages since the last call."""
        if not self._began:
            return [Message("again")] if is_run(self._path) else []
        records = self._metrics.new_records()
        if records is None:
            return [Message("again")]
        found = [self._rows(records)] if records else []
        self._is_stale = self._is_stale or bool(records)
        now = self._clock()
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            if self._look() != self._seen:
                return [*found, Message("again")]
            self._is_stale = self._is_stale or _size(self._path / "events.jsonl") != self._events
            self._events = _size(self._path / "events.jsonl")
        if self._is_stale and now - self._refreshed >= max(REFRESH_EVERY, SHARE * self._cost()):
            self._is_stale, self._refreshed = False, now
            found.append(Message("refresh"))
        return found

    def _look(self) -> tuple[str, float]:
        """The state, and when the recipe was written: a run that starts over writes it again."""
        state = state_of(self._path, read_object(self._path / "summary.json"), self._environment)
        return state, _time(self._path / "recipe.yaml")

    def _rows(self, records: list[Record]) -> Message:
        self._last.extend(records)
        words = [list(line) for line in now_of(list(self._last), self._recipe).words()]
        return Message("rows", {"now": words, **rows_of(records)}, str(self._metrics.cursor))


def rows_of(records: list[Record]) -> dict[str, Any]:
    """The new points of the curves, in columns."""
    trained = [record for record in records if "eval_loss" not in record]
    names = (*(chart.key for chart in CHARTS), *AXES)
    columns = {key: [number(record.get(key)) for record in trained] for key in names}
    # A curve without any finite value has no chart, for which the page would be loaded again and again.
    columns = {key: values for key, values in columns.items() if key in AXES or any(map(math.isfinite, values))}
    evaluated = [[record["step"], number(record["eval_loss"])] for record in records if "eval_loss" in record]
    return {"steps": [record["step"] for record in trained], "columns": columns, "evaluations": evaluated}


def _size(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0


def _time(path: Path) -> float:
    try:
        return os.stat(path, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0
