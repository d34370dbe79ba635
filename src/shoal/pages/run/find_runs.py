"""Find the runs below a folder, and say in one line what each of them does. Only the ends of large files are read."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError
from shoal.pages.run.metrics_table import make_table, number
from shoal.pages.run.own_files import read_object, tail_records, why_not_a_folder
from shoal.pages.run.read_run import is_run
from shoal.pages.run.state import State, last_write, state_of
from shoal.pages.run.verdict import last_loss

DEEPEST = 4
"""Folders below the given one in which runs are looked for."""
MOST_FOLDERS = 20_000


@dataclass(frozen=True)
class RunLine:
    """One run in a list."""

    path: str
    state: State
    step: int
    loss: float | None
    """NaN: it was not finite; None: it is not known."""
    tokens_per_s: float | None
    age_seconds: float
    """Since its last write."""
    host: str


def find_runs(folder: Path) -> list[RunLine]:
    """The runs in a folder and below it, the newest first."""
    if why := why_not_a_folder(folder):
        what = f"DIR must be a folder, got {str(folder)!r}, which cannot be entered: {why}"
        raise ShoalError(what, fix="shoal ls FOLDER, such as the one with runs/", code="R063")
    found = [_line(path) for path in _folders(folder) if is_run(path)]
    return sorted(found, key=lambda line: line.age_seconds)


def newest_run(folder: Path, *, fix: str) -> Path:
    """The run below a folder that was written last; raises with this fix if there is none."""
    found = find_runs(folder) if os.path.isdir(folder) else []
    if not found:
        raise ShoalError(f"there is no run in {str(folder)!r} and below", fix=fix, code="R071")
    return Path(found[0].path)


def _folders(folder: Path) -> Iterator[Path]:
    """The folder and those below it. Links, hidden folders and checkpoints are left out; nothing is below a run."""
    ahead, seen = [(folder, 0)], 0
    while ahead and seen < MOST_FOLDERS:
        path, depth = ahead.pop()
        seen += 1
        yield path
        if depth < DEEPEST and not is_run(path):
            try:
                entries = [entry for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]
            except OSError:
                continue
            ahead += [(Path(entry.path), depth + 1) for entry in entries if not entry.name.startswith((".", "__"))]


def _line(path: Path) -> RunLine:
    summary, environment = read_object(path / "summary.json"), read_object(path / "environment.json")
    table = make_table(tail_records(path / "metrics.jsonl"))
    steps = number(summary.get("steps"))
    made = table.steps[-1] if table.steps else 0
    speed = number(summary.get("tokens_per_s"))
    return RunLine(
        path=str(path),
        state=state_of(path, summary, environment),
        step=int(steps) if 0 <= steps < 2**53 else made,
        loss=last_loss(summary, table),
        tokens_per_s=speed if math.isfinite(speed) else table.last("tokens_per_s"),
        age_seconds=max(0.0, time.time() - last_write(path)),
        host=str(environment.get("host") or "")[:80],
    )
