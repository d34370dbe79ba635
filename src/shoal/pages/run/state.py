"""The state of a run, from its lock, its summary, its last write and its events.

A lock that another host holds may not be seen here. So a run of another host that writes nothing is silent, and dead
only if its launcher has written why it failed.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shoal.pages.run.metrics_table import number
from shoal.pages.run.own_files import open_own, tail_records

State = Literal["running", "ended", "stopped", "dead", "silent"]

RECENT = 60.0
"""Seconds since the last write within which a run of another host counts as running."""
LINES = 3.0
"""The same, in times between two lines of its metrics: steps may be long."""


def state_of(path: Path, summary: Mapping[str, Any], environment: Mapping[str, Any]) -> State:
    """The state of the run in a directory."""
    if is_locked(path / "lock") or is_locked(path / "events.jsonl"):  # of a launcher that brings ranks together again
        return "running"
    if summary:
        return "stopped" if summary.get("was_stopped") is True else "ended"
    if environment.get("host") in (None, platform.node()) or _has_failed(path):
        return "dead"
    age = time.time() - last_write(path)
    return "running" if age < RECENT or age < LINES * _between_lines(path) else "silent"


def _has_failed(path: Path) -> bool:
    """Whether the last start of a run has failed, as its launcher has written."""
    kinds = [event.get("event") for event in tail_records(path / "events.jsonl")]
    return next((kind for kind in reversed(kinds) if kind in ("failed", "started", "resumed")), "") == "failed"


def _between_lines(path: Path) -> float:
    """Seconds between the last two lines of the metrics; 0: they are not known."""
    lines = [each for each in tail_records(path / "metrics.jsonl") if "step_seconds" in each][-2:]
    before = lines[0]["step"] if len(lines) == 2 else 0
    seconds = number(lines[-1]["step_seconds"]) * (lines[-1]["step"] - before) if lines else 0.0
    return seconds if 0 < seconds < 86400 else 0.0


def is_locked(path: Path) -> bool:
    """Whether a process of this machine holds the lock. A shared lock is tried: readers do not disturb each other."""
    try:
        with open_own(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def last_write(path: Path) -> float:
    """When a file of the run was last written, in seconds since the epoch; 0: there is none."""
    times = [0.0]
    for name in ("metrics.jsonl", "summary.json", "environment.json", "recipe.yaml"):
        try:
            times.append(os.stat(path / name, follow_symlinks=False).st_mtime)
        except OSError:
            continue
    return max(times)
