"""Signals, imports and garbage collection of the process that runs a command."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.blueprint.plan import Plan


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raise on signals that end the process, so that `finally` blocks run. While workers run, the launcher passes the
    signals on to them."""
    from shoal.launch.stop_signals import STOP_SIGNALS

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in STOP_SIGNALS if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import without garbage collection: imported objects stay. The first step of a tiny model came after 5.0 s, and
    after 5.4 without this (measured, medians of seven in turns, Intel Xeon)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()  # later collections skip them too, here and in a worker
            gc.enable()


def import_for_workers(plan: Plan) -> None:
    """Import what workers of a plan need, if they are forked from this process: once, and not again after a restart."""
    from shoal.launch.local import fork_is_safe
    from shoal.parallel.data.preload import preload

    if fork_is_safe():
        with without_garbage_collection():
            preload(plan)


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """End the process at once on Ctrl-C. During an import, Python would print a confusing traceback."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
