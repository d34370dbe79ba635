"""Warn once when steps wait for their data."""

from __future__ import annotations

from collections import deque

from shoal.errors import Problem

WINDOW = 20
"""Steps that are looked at together: one late batch is no warning."""
WARN = 0.1
"""The part of the time from which waiting for data is worth a warning."""


class SlowData:
    """The part of the last steps that this rank waited for batches."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._num_seen = 0
        self._has_warned = False

    def warning(self, seconds: float, waited: float, *, workers: int) -> Problem | None:
        """A warning, once. `seconds`, `waited`: of the step that ended. `workers`: processes that prepare batches of
        this rank; 0: none."""
        self._num_seen += 1
        if self._has_warned or self._num_seen <= WINDOW:  # the first steps start workers, and compile
            return None
        self._steps.append((seconds, waited))
        total, waiting = (sum(each) for each in zip(*self._steps, strict=True))
        if len(self._steps) < WINDOW or waiting < WARN * total:
            return None
        self._has_warned = True
        by = (
            f"{workers} processes prepare"
            if workers > 1
            else "one process prepares"
            if workers
            else "a thread prepares"
        )
        what = f"the last {WINDOW} steps waited {waiting / total:.0%} of their time for data; {by} it"
        return Problem("T090", what, f"--data.workers {max(2, 2 * workers)} --data.prefetch 4")
