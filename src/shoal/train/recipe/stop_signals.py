"""Signals that ask a run to stop (Ctrl-C, SIGTERM, SIGUSR1): it ends when its step is made."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shoal.launch.worker import PASSED_ON
from shoal.observe.progress import ProgressLine


class StopRequest:
    """Whether anyone has asked for the end, and been answered."""

    def __init__(self, line: ProgressLine) -> None:
        self.is_first_step = False
        """Whether the first step is being made: it may compile for a minute, and nobody writes a line meanwhile."""
        self._line = line
        self._is_asked = self._is_answered = False

    def __bool__(self) -> bool:
        return self._is_asked

    def note(self, number: int, frame: FrameType | None) -> None:
        """A signal came. A second Ctrl-C ends the process at once."""
        if self._is_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._is_asked = True
        if self.is_first_step:
            self.answer()

    def answer(self) -> None:
        """Tell whoever has asked, once."""
        if self._is_asked and not self._is_answered:
            self._is_answered = True
            self._line.say("stopping after the next step; Ctrl-C again ends at once")


@contextmanager
def stop_on_signals(line: ProgressLine) -> Iterator[StopRequest]:
    """True once a signal came, which would have ended the process."""
    asked = StopRequest(line)
    before = {number: signal.signal(number, asked.note) for number in PASSED_ON}
    try:
        yield asked
    finally:
        # A worker that was asked is on its way out, and its launcher may ask it once more.
        is_leaving = bool(asked) and multiprocessing.parent_process() is not None
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if is_leaving else handler)
