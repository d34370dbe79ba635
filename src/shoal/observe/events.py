"""Events of a run: when it started and resumed, what it saved, and why it failed or stopped. `shoal report` shows them.

events.jsonl has one JSON object per line: `event`, `step`, `time` in seconds since the epoch and, of a failure,
`reason` and `code`. A full disk or a lost file system loses events and nothing else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from shoal.errors import ShoalError
from shoal.files import opened

Event = Literal["started", "resumed", "saved", "not saved", "failed", "stopped", "ended"]

LONGEST_REASON = 1500
"""Characters of a reason."""


def append_event(directory: Path, event: Event, step: int, reason: str = "", code: str = "") -> None:
    """Append one line, in one write."""
    record: dict[str, str | int | float] = {"event": event, "step": step, "time": round(time.time(), 3)}
    record |= {"reason": reason[:LONGEST_REASON]} if reason else {}
    record |= {"code": code} if code else {}
    with suppress(OSError), opened(directory / "events.jsonl", "ab", buffering=0) as file:
        file.write(json.dumps(record).encode() + b"\n")


def append_end(summary: Mapping[str, Any]) -> None:
    """Append the end of a run that has a directory, by its summary."""
    if summary["run_directory"]:
        event: Event = "stopped" if summary["was_stopped"] else "ended"
        append_event(Path(summary["run_directory"]), event, summary["steps"])


def append_failure(directory: Path, error: Exception) -> None:
    """Append the failure of a run, at the last step of its metrics."""
    if isinstance(error, ShoalError) and error.problems:
        reason, code = error.problems[0].what, error.problems[0].code
    else:
        reason, code = f"{type(error).__name__}: {error}", ""
    append_event(directory, "failed", last_step(directory / "metrics.jsonl"), reason.strip().partition("\n")[0], code)


def last_step(path: Path) -> int:
    """The step of the last whole line of metrics; 0: there is none."""
    with suppress(OSError), opened(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2**14))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError, KeyError, TypeError):
                return int(json.loads(line)["step"])
    return 0
