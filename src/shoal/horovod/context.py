"""The engine of this process: created by `init`, ended by `shutdown`, found by every collective."""

from __future__ import annotations

import atexit
import os
import time
from dataclasses import dataclass

from shoal.comm.group_lifetime import drop_groups, is_cut
from shoal.errors import ShoalError
from shoal.horovod.engine.connect import open_engine
from shoal.horovod.engine.engine import Engine

SECONDS_TO_DROP = 10.0


@dataclass
class _Context:
    engine: Engine | None = None
    has_exit_hook: bool = False
    process: int = 0
    """The process that has called `init`; its forks have a copy of this."""


_context = _Context()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not."""
    return _context.engine is not None


def engine() -> Engine:
    """Return the engine, or raise if there is none."""
    if _context.engine is None:
        raise ShoalError("Horovod has not been initialized", fix="hvd.init()", code="H001")
    return _context.engine


def start() -> Engine:
    """Start the engine, unless it runs."""
    if _context.engine is None:
        _context.engine, _context.process = open_engine(), os.getpid()
        if not _context.has_exit_hook:
            atexit.register(shutdown)
            _context.has_exit_hook = True
    return _context.engine


def shutdown() -> None:
    """Leave the other ranks, and close the process group that `init` created. A second call does nothing."""
    current, _context.engine = _context.engine, None
    if current is None or _context.process != os.getpid():  # a fork must not leave in the name of its parent
        return
    current.stop()
    if current.failure and current.world.is_owner and is_cut():
        time.sleep(0.05)  # gloo's threads release the tensors of what has failed
        drop_groups(SECONDS_TO_DROP)
    else:
        current.world.close()
