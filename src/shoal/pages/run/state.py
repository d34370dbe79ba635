"""The state of a run: running, ended, stopped or dead, from its lock, its summary and its last write."""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from shoal.pages.run.own_files import open_own

State = Literal["running", "ended", "stopped", "dead"]

RECENT = 60.0
"""Seconds since the last write within which a run of another host counts as running: its lock is not seen here."""


def state_of(path: Path, summary: Mapping[str, Any], environment: Mapping[str, Any]) -> State:
    """The state of the run in a directory."""
    if is_locked(path / "lock"):
        return "running"
    if summary:
        return "stopped" if summary.get("was_stopped") is True else "ended"
    is_elsewhere = environment.get("host") not in (None, platform.node())
    if is_elsewhere and time.time() - last_write(path) < RECENT:
        return "running"
    return "dead"


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
