"""Restart after a failure, a limited number of times, with growing pauses.

generation 0 ── step 1 ── 2 ── 3 ── † ─ pause ─ generation 1 ── from the last checkpoint ── 3 ── 4 ── ...

A generation shares only the checkpoints with the one before it. Its workers have a rendezvous of their own, so none of
them waits for a dead peer. Where one worker is replaced and the others live on (`shoal.launch.replacement`), that is a
generation, too, and counts as a restart.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(slots=True, kw_only=True)
class RestartBudget:
    """Counts the restarts of a run, of all workers or of one, and decides whether there is another.

    `most` is the number of restarts since the newest saved step, so a run that makes progress is restarted without a
    limit. Errors of the user or of a program, a failed allocation, and an exception or a kill for lack of memory that
    repeats in the same place are never retried.
    """

    most: int
    say: Callable[[str], None]
    note: Callable[[RunFailed], None] = lambda error: None
    """Called with a failure after which one worker is replaced: the launch itself does not fail."""
    generation: int = 0
    """The number of restarts so far."""
    _used: int = 0
    """Those since the newest saved step."""
    newest: int = -1
    """The newest saved step."""
    _cause: str = ""
    """The exception of the last failure."""

    def take(self, error: RunFailed) -> bool:
        """Whether the run restarts after a failure. A failure while one worker is replaced is the same failure."""
        saved = -1 if error.saved_step is None else error.saved_step
        if made_progress := saved > self.newest:
            self._used, self.newest = 0, saved
        cause, last = _without_addresses(error.cause), self._cause
        is_again = bool(cause) and cause == last and not made_progress
        if is_again and error.may_pass and self.most:
            self.say(f"not restarted: {_again(error)} before the restart")
        is_same = error.is_of_replacement and not made_progress
        if not error.may_pass or is_again or (self._used >= self.most and not is_same):
            return False
        self._used, self._cause = self._used + (not is_same), cause
        self.generation += 1
        return True

    def report_replacement(self, error: RunFailed, ranks: str) -> None:
        """Report and note a failure after which some ranks are replaced."""
        self.note(error)
        self.report(error, f"replacing {ranks}; all ranks continue")

    def report(self, error: RunFailed, what: str) -> None:
        """Report the failure and `what` is done after it."""
        first = str(error).partition("\n    fix:")[0] if _STACK in str(error) else str(error).splitlines()[0]
        since = f" since step {self.newest} was saved" if self.newest >= 0 else ""
        where = "from the last checkpoint" if self.newest >= 0 else "from the newest checkpoint, if there is one"
        self.say(f"{first}\n  {what} {where}: restart {self._used} of {self.most}{since}")


def with_restarts(
    start: Callable[[int], T], budget: RestartBudget, *, sleep: Callable[[float], None] = time.sleep
) -> T:
    """Return `start(generation)`; when it fails and the budget allows it, start all workers again."""
    recent = 0
    while True:
        began, saved = time.monotonic(), budget.newest
        try:
            return start(budget.generation)
        except RunFailed as error:
            if not budget.take(error):
                raise
            long_enough = LONG_ENOUGH_TO_SAVE if budget.newest > saved else LONG_ENOUGH
            recent = 1 if time.monotonic() - began > long_enough else recent + 1
            budget.report(error, "restarting all workers")
            sleep(pause_before(recent))


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
