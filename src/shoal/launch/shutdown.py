"""End a finished process in bounded time, whatever user code has left running.

Python joins every non-daemon thread and every child process of `multiprocessing`, and calls every exit handler, each
without a limit. A thread that sleeps for an hour would hold up a finished run for an hour.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from multiprocessing.process import BaseProcess

SECONDS_TO_LEAVE = 4.0
"""Seconds that threads and child processes have to end after the run."""
SECONDS_FOR_EXIT_HANDLERS = 60.0
"""The same for exit handlers, which may upload logs."""


def seconds_for_handlers(timeout: float | None = None) -> float:
    """Seconds that exit handlers have in a run with this `launch.timeout`; None: not known."""
    return max(SECONDS_TO_LEAVE, min(SECONDS_FOR_EXIT_HANDLERS, timeout or SECONDS_FOR_EXIT_HANDLERS))


def leave_in_time(exit_code: int, *, name: str, timeout: float | None = None) -> None:
    """Start a thread that ends this process after some seconds and reports what was still running.

    It waits longer if only an exit handler is left. `timeout`: see `seconds_for_handlers`.
    """
    most = seconds_for_handlers(timeout)

    def end() -> None:
        seconds = SECONDS_TO_LEAVE
        time.sleep(seconds)
        if not _left_running() and most > seconds:
            handler = f"an exit handler{_place_of_main_thread()}"
            _say(f"shoal: {name} is done, and waits for {handler}, {most:g} s at most")
            time.sleep(most - seconds)
            seconds = most
        left = ", ".join(_left_running()) or f"an exit handler{_place_of_main_thread()}"
        _say(f"shoal: {name} is done, and left {left} running; ended after {seconds:g} s")
        for child in _children():
            child.kill()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(exit_code)

    threading.Thread(target=end, name="shoal-leave", daemon=True).start()


def _left_running() -> list[str]:
    return [
        *(f"thread {thread.name!r}" for thread in threading.enumerate() if _holds_up(thread)),
        *(f"process {child.name!r} (pid {child.pid})" for child in _children()),
    ]


def _children() -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if not child.daemon]


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _holds_up(thread: threading.Thread) -> bool:
    return thread.is_alive() and not thread.daemon and thread is not threading.main_thread()


def _place_of_main_thread() -> str:
    """The position of the main thread, as ` (file:line)`; empty in Python's own files."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None or frame.f_code.co_filename.startswith((os.path.dirname(os.__file__), "<")):
        return ""
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
