"""Processor time of a command, and how slow this machine is: bounds of time must hold on busy and slow ones."""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path


def processor_seconds(command: Sequence[str | Path]) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Of a command that succeeds: its time on a machine that has nothing else to do."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended


def slowness() -> float:
    """Of Python here, against a machine on which a loop of three million turns takes 0.1 s; 1 at least."""
    start = time.process_time()
    for _ in range(3_000_000):
        pass
    return max(1.0, (time.process_time() - start) / 0.1)
