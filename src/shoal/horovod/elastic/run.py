"""The loop of elastic training: synchronize, train, and after a failure restore, join again and continue."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shoal.horovod.basics import init, shutdown
from shoal.horovod.elastic.rejoin import take_new_place
from shoal.horovod.elastic.state import State
from shoal.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt, MismatchError


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function whose first argument is a `State`.

        sync ─► function ─► returns
         ▲         │ HorovodInternalError: restore the last commit
         └─ reset ◄┤
                   └ HostsUpdatedInterrupt: keep the state

    Under `shoal run --restarts N` a process that has ended is replaced, and rank 0 is one that has survived. A
    `MismatchError` is raised again: the same calls would fail in the same way.
    """

    @functools.wraps(function)
    def loop(state: State, *args: Any, **kwargs: Any) -> Any:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return function(state, *args, **kwargs)
            except MismatchError:
                raise
            except HorovodInternalError:
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            shutdown()
            take_new_place()
            init()
            state.on_reset()

    return loop
