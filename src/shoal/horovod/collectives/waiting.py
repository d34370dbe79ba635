"""Wait: for a handle, for other ranks, and for the end of everyone's data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.horovod import context
from shoal.horovod.collectives.alltoall import with_counts
from shoal.horovod.collectives.requests import registered
from shoal.horovod.engine.messages import Kind, Request
from shoal.horovod.process_sets import ProcessSet, global_process_set


def poll(handle: int) -> bool:
    """Whether `synchronize` returns at once."""
    return context.engine().poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for a collective, and return its result; None for a handle that was waited for already."""
    result = context.engine().wait(handle)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        return with_counts(result, None)
    return result


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called this."""
    engine = context.engine()
    set_id = registered(Kind.BARRIER, process_set)
    engine.call(Request(kind=Kind.BARRIER, name=engine.unnamed(Kind.BARRIER, set_id), set_id=set_id))


def join(device: int = -1) -> int:
    """Say that this rank has no more data: until all ranks have said so, it adds zeros to the others' allreduces.

    Returns the rank that joined last. `device` has no effect: zeros are made where the tensors of the others are.
    """
    value: int = context.engine().call(Request(kind=Kind.JOIN, name="join"))
    return value
