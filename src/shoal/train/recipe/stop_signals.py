"""Stop a run after the current step on Ctrl-C, SIGTERM or SIGUSR1."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shoal.launch.stop_signals import STOP_SIGNALS
from shoal.observe.progress import ProgressLine


class StopRequest:
    """Whether a signal has requested the end of the run, and whether that was reported."""

    def __init__(self, line: ProgressLine) -> None:
        self.is_first_step = False
        """Whether the first step is running. It may compile for a minute, so a signal is acknowledged at once."""
        self._line = line
        self._is_of_terminal = False
        self._is_requested = self._is_acknowledged = False

    def __bool__(self) -> bool:
        return self._is_requested

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. A second Ctrl-C ends the process at once."""
        if self._is_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._is_of_terminal |= number == signal.SIGINT
        self._is_requested = True
        if self.is_first_step:
            self.acknowledge()

    def acknowledge(self) -> None:
        """Report a received signal, once."""
        if self._is_requested and not self._is_acknowledged:
            self._is_acknowledged = True
            # SIGTERM also comes from the launcher of several hosts, where a host is lost or back.
            hint = "; press Ctrl-C again to end at once" if self._is_of_terminal else ""
            self._line.say(f"stopping after the next step{hint}")


@contextmanager
def stop_on_signals(line: ProgressLine) -> Iterator[StopRequest]:
    """Catch signals that would end the process; the value is true once one has come.

    Python gives signals to the main thread alone. Ray trains in another one, and ends workers without a signal.
    """
    stop_request = StopRequest(line)
    if threading.current_thread() is not threading.main_thread():
        yield stop_request
        return
    before = {number: signal.signal(number, stop_request.receive) for number in STOP_SIGNALS}
    is_done = False
    try:
        yield stop_request
        is_done = True
    finally:
        # A worker that is ending ignores further signals, which its launcher may send. It may also end because a rank
        # of another host had the signal earlier.
        is_leaving = (is_done or bool(stop_request)) and multiprocessing.parent_process() is not None
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if is_leaving else handler)
