"""Close the world of a script that ends without closing it, as scripts of DeepSpeed and Accelerate do.

gloo's threads take the GIL to release the last collective's tensors. A thread that does so during Python's shutdown
ends the process ("terminate called without an active exception"): a training that is done would end with a failure, in
one of some fifteen runs.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable

_left_open: list[Callable[[], None]] = []


def close_at_exit(close: Callable[[], None]) -> None:
    """Call this function at the end of the process, unless `forget` or another one comes first."""
    if not _left_open:
        atexit.unregister(_close)
        atexit.register(_close)
    _left_open[:] = [close]


def forget() -> None:
    """The world was closed."""
    _left_open.clear()


def _close() -> None:
    """A rank that fails leaves its group to the end of the process, as `World.__exit__` does."""
    has_failed = getattr(sys, "last_value", None) is not None
    for close in () if has_failed else tuple(_left_open):
        close()
