"""End with the parent process, and become a child process that outlives nothing.

`PR_SET_PDEATHSIG` makes the kernel kill a process when its parent ends, however it ends. So a killed agent leaves no
template, a killed template no runner, and the workers end with the runner by their lifeline.
"""

from __future__ import annotations

import ctypes
import os
import signal
import warnings
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


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
