"""The signals that request a clean stop, and a queue for them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_HANG_UP = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)  # nohup ignores it
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *_HANG_UP)
"""Ctrl-C, a scheduler, Slurm before its time limit, and a closed terminal."""


@contextlib.contextmanager
def queueing_signals(queue: list[int]) -> Iterator[None]:
    """Append stop signals to a queue. Only the main thread can; elsewhere handlers stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def enqueue(number: int, frame: FrameType | None) -> None:
        queue.append(number)

    before = {number: signal.signal(number, enqueue) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
