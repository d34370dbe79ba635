"""Start again after a failure, a few times, with growing pauses.

generation 0 ── step 1 ── 2 ── 3 ── † ─ pause ─ generation 1 ── from the last checkpoint ── 3 ── 4 ── ...

A generation shares nothing with the one before it but the checkpoints: its workers meet in a place of their own, and
none of them ever looks for a peer that is dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from shoal.errors import RunFailed

T = TypeVar("T")

FIRST_PAUSE = 0.05
"""Seconds before the first restart: a process that was killed is worth no waiting."""
LONGEST_PAUSE = 30.0
LONG_ENOUGH = 300.0
"""Seconds after which a generation that fails has done so for a reason of its own: pauses begin anew."""


def pause_before(restart: int) -> float:
    """Seconds to wait before a restart, counted from 1.

    >>> [round(pause_before(number), 2) for number in (1, 2, 3, 4, 9)]
    [0.05, 1.0, 2.0, 4.0, 30.0]
    """
    return FIRST_PAUSE if restart == 1 else min(LONGEST_PAUSE, 2.0 ** (restart - 2))


def with_restarts(start: Callable[[int], T], *, most: int, say: Callable[[str], None]) -> T:
    """What `start(generation)` returns, started again at most `most` times when it fails.

    A mistake of a person, or in a program, is raised at once, and so is an exception that comes back as it was: it
    would come back once more.
    """
    recent, before = 0, ""
    for generation in range(most + 1):
        began = time.monotonic()
        try:
            return start(generation)
        except RunFailed as error:
            first = str(error).splitlines()[0]
            is_again = first == before and "failed:" in first
            if generation == most or not error.may_pass or is_again:
                raise
            recent, before = 1 if time.monotonic() - began > LONG_ENOUGH else recent + 1, first
            say(
                f"{first}\n  all workers are started again from the last checkpoint: restart {generation + 1} of {most}"
            )
            time.sleep(pause_before(recent))
    raise AssertionError("the last generation either returns or raises")
