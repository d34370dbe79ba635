"""End with the parent process, become a child process that outlives nothing, and end what a child has left.

`PR_SET_PDEATHSIG` makes the kernel kill a process when its parent ends, however it ends. So a killed agent leaves no
template, a killed template no runner, and the workers end with the runner by their lifeline.

A lifeline acts late in a worker that holds the GIL, and never in one that a signal has stopped. So the agent adopts the
workers of a runner that has ended (`PR_SET_CHILD_SUBREAPER`), and kills them itself before it reports their end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SECONDS_TO_END = 0.1
"""Seconds that a killed process usually needs at most."""


class Orphans:
    """The processes that this one has adopted, because those that have started them have ended."""

    def __init__(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._own = set(_children())

    def end(self, *, but: int) -> bool:
        """Kill all of them and wait a moment; returns whether all have ended. `but`: a child that was not adopted. What
        has left the session of this process is to live on."""
        deadline = time.monotonic() + _SECONDS_TO_END
        while left := [pid for pid in _children() if pid not in self._own and pid != but and not _has_ended(pid)]:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True


def _children() -> Iterator[int]:
    """The children of this process in its own session."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[1:4]
            if (int(parent), int(session)) == (os.getpid(), os.getsid(0)):
                yield int(folder.name)


def _has_ended(child: int) -> bool:
    """Whether a child has ended; it is reaped then."""
    try:
        return os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent`, which has forked it, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended before the call
        os._exit(1)


def forked(function: Callable[[], int]) -> int:
    """Call a function in a fork that ends with this process; returns the pid of the fork."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks of a process with threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            die_with_parent(parent)
            if os.getpgrp() != os.getpid():
                os.setpgid(0, 0)  # Ctrl-C in a terminal reaches only the coordinator
            code = function()
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return child
