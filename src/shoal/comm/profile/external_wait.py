"""Add a wait that another timer has measured, such as that of torch's DDP, to the parts of a step."""

from __future__ import annotations

import time

import torch.distributed as dist

from shoal.comm.profile.timer import Span, current
from shoal.comm.profile.waits import axis_of


def note_wait(group: dist.ProcessGroup, begin: int, end: int, *, inside: str) -> None:
    """Note that this rank waited for its group, in nanoseconds since the epoch, inside the last part of a name."""
    timer = current.timer
    if timer is None:
        return
    offset = time.time_ns() - time.monotonic_ns()
    key = timer.enter(f"{inside} {group.group_name}")
    timer.entered[key] = begin - offset
    timer.insert(inside, Span(axis_of(group), begin - offset, key, is_wait=True, end=end - offset))
