"""Restart after a failure, a limited number of times, with growing pauses.

generation 0 ── step 1 ── 2 ── 3 ── † ─ pause ─ generation 1 ── from the last checkpoint ── 3 ── 4 ── ...

A generation shares only the checkpoints with the one before it. Its workers have a rendezvous of their own, so none of
them waits for a dead peer.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from typing import TypeVar

from shoal.errors import RunFailed

T = TypeVar("T")

FIRST_PAUSE = 0.05
"""Seconds before the first restart; a killed process needs no waiting."""
LONGEST_PAUSE = 30.0
_STACK = "\n  stack of rank "
"""Begins the stack of a rank that hung; the traceback of an exception is left out where the run continues."""
LONG_ENOUGH = 300.0
"""Seconds of a generation after which its failure counts as unrelated to the one before: pauses start over."""
LONG_ENOUGH_TO_SAVE = 10.0
"""The same, for a generation that has saved a newer step: machines that often fail would else wait most of the time."""


def pause_before(restart: int) -> float:
    """Seconds to wait before a restart, counted from 1.

    >>> [round(pause_before(number), 2) for number in (1, 2, 3, 4, 9)]
    [0.05, 1.0, 2.0, 4.0, 30.0]
    """
    return FIRST_PAUSE if restart == 1 else min(LONGEST_PAUSE, 2.0 ** (restart - 2))


def with_restarts(
    start: Callable[[int], T], *, most: int, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> T:
    """Return `start(generation)`, restarted when it fails.

    `most` is the number of restarts since the newest saved step, so a run that makes progress is restarted without a
    limit. Errors of the user or of a program, a failed allocation, and an exception or a kill for lack of memory that
    repeats in the same place are raised at once.
    """
    used, recent, newest, before = 0, 0, -1, ""
    for generation in itertools.count():
        began = time.monotonic()
        try:
            return start(generation)
        except RunFailed as error:
            saved = -1 if error.saved_step is None else error.saved_step
            if made_progress := saved > newest:
                used, newest = 0, saved
            cause, last = _without_addresses(error.cause), before
            is_again = bool(cause) and cause == last and not made_progress
            if is_again and error.may_pass and most:
                say(f"not restarted: {_again(error)} before the restart")
            if used >= most or not error.may_pass or is_again:
                raise
            used, before = used + 1, cause
            lived = time.monotonic() - began
            recent = 1 if lived > (LONG_ENOUGH_TO_SAVE if made_progress else LONG_ENOUGH) else recent + 1
            first = str(error).partition("\n    fix:")[0] if _STACK in str(error) else str(error).splitlines()[0]
            since = f" since step {newest} was saved" if newest >= 0 else ""
            where = "from the last checkpoint" if newest >= 0 else "from the newest checkpoint, if there is one"
            say(f"{first}\n  restarting all workers {where}: restart {used} of {most}{since}")
            sleep(pause_before(recent))
    raise AssertionError("a generation either returns or raises")


def _again(error: RunFailed) -> str:
    if error.memory:
        return "the memory ran out in the same phase"
    return "the same exception was raised in the same step"


def _without_addresses(text: str) -> str:
    """Remove addresses from the text of an exception, which differ each time.

    >>> _without_addresses("<Thing at 0x7f30a1> failed")
    '<Thing at 0x> failed'
    """
    return re.sub(r"0x[0-9a-fA-F]+", "0x", text)
