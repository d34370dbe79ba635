"""The ranks of a run and their state, from the files that each of them writes (`run.per_rank_metrics: true`)."""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from shoal.pages.run.metrics_table import number
from shoal.pages.run.own_files import tail_records

MOST = 256
"""Ranks that are read."""
LATE = 5.0
"""A rank is late if its last line is this many of its steps older than the newest one."""
ALWAYS = 10.0
"""Seconds by which it is older at least."""


@dataclass(frozen=True)
class RankState:
    """One rank as its last line says."""

    rank: int
    step: int
    step_seconds: float
    age_seconds: float
    """Since its last line."""
    state: str
    """steps or late."""


def rank_states(path: Path) -> list[RankState]:
    """The ranks of a run; empty: they write no files of their own."""
    found = []
    for rank, file in _files(path):
        records = tail_records(file)
        if records:
            age = max(0.0, time.time() - os.stat(file, follow_symlinks=False).st_mtime)
            found.append((rank, records[-1]["step"], number(records[-1].get("step_seconds")), age))
    newest = min((age for _, _, _, age in found), default=0.0)
    return [RankState(*each, "late" if _is_late(each, newest) else "steps") for each in found]


def _is_late(each: tuple[int, int, float, float], newest: float) -> bool:
    _, _, seconds, age = each
    return age - newest > max(ALWAYS, LATE * seconds if math.isfinite(seconds) else 0.0)


def _files(path: Path) -> list[tuple[int, Path]]:
    try:
        names = [entry.name for entry in os.scandir(path)]
    except OSError:
        return []
    matches = [match for name in names if (match := re.fullmatch(r"metrics\.rank(\d{1,6})\.jsonl", name))]
    return sorted((int(match[1]), path / match[0]) for match in matches)[:MOST]
