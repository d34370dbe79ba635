"""See every collective and message of this process that Python starts, and time the waits for them.

torch's flight recorder knows when a collective was entered, but on gloo neither its end nor the messages between two
ranks. A trace of torch's profiler names no group. So for the few steps of a profile the methods of torch's
`ProcessGroup` that start collectives, and `Work.wait`, are replaced. Both are private in part: `tests/dist/
test_profile.py` notices when a torch has others.

Not seen are collectives that C++ starts: those of DDP, whose own timers are read (`parallel.data.ddp`), and those of
compiled code, which count as the computation around them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from shoal.comm.profile.stream_waits import StreamWaits
from shoal.comm.profile.timer import PartTimer, current, waiting

COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("alltoall", "alltoall_base", "broadcast", "reduce", "gather", "scatter", "barrier"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),
)
"""Methods of a group that start a collective; a torch may lack some."""
MESSAGES = ("send", "recv")
Works = weakref.WeakKeyDictionary[Any, tuple[str, str]]
"""What was started and is waited for later → its axis and key."""
WORLD = "world"
"""The axis of messages between all ranks: losses, counts and norms."""
OTHER_GROUP = "other group"
"""The axis of a group that is none of the layout's."""


def watch_waits() -> Callable[[], None]:
    """Replace the methods; returns a function that restores them."""
    works: Works = weakref.WeakKeyDictionary()
    streams = StreamWaits()
    kinds = ((dist.ProcessGroup, (*COLLECTIVES, *MESSAGES)), (dist.Work, ("wait",)))
    # `vars`, not getattr: of a method in C++ that would be a function without its instance, which cannot be put back.
    before = [(kind, name, vars(kind)[name]) for kind, names in kinds for name in names if name in vars(kind)]
    for kind, name, _ in before:
        method = getattr(kind, name)
        setattr(kind, name, _timed(method, works) if name == "wait" else _noting(method, name, works, streams))
    restore_streams = streams.watch()

    def restore() -> None:
        restore_streams()
        for kind, name, method in before:
            setattr(kind, name, method)

    return restore


def _timed(wait: Any, works: Works) -> Any:
    """The wait for a collective, timed."""

    @functools.wraps(wait)
    def call(work: Any, *arguments: Any, **options: Any) -> Any:
        axis, key = works.get(work, (WORLD, None))
        with waiting(axis, key):
            return wait(work, *arguments, **options)

    return call


def _noting(method: Any, name: str, works: Works, streams: StreamWaits) -> Any:
    """The method, with a note of the collective that it starts."""

    @functools.wraps(method)
    def call(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
        timer = current.timer
        if timer is None:
            return method(group, *arguments, **options)
        key = timer.enter(_channel(group, name, arguments, options))
        axis = axis_of(group)
        with waiting(axis, key):  # some backends wait here
            work = method(group, *arguments, **options)
        streams.note(axis, key)
        if isinstance(work, dist.Work):
            works[work] = axis, key
            _note_end(work, name, timer, key)
        return work

    return call


def _note_end(work: dist.Work, name: str, timer: PartTimer, key: str) -> None:
    """Note when a collective is over, by gloo's own thread. Messages do not say it, and streams do not either."""
    if name in MESSAGES or not timer.is_of_host:
        return

    def note(_: Any) -> None:
        timer.ended[key] = timer.clock()

    with suppress(RuntimeError, NotImplementedError):  # a backend that has no futures
        work.get_future().add_done_callback(note)


def _channel(group: dist.ProcessGroup, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """A name that all ranks of a collective, or both of a message, have for it."""
    if name not in MESSAGES:
        return group.group_name
    peer = arguments[1] if len(arguments) > 1 else options["dstRank" if name == "send" else "srcRank"]
    tag = arguments[2] if len(arguments) > 2 else options.get("tag", 0)
    sender, receiver = (group.rank(), peer) if name == "send" else (peer, group.rank())
    return f"{group.group_name}:{sender}>{receiver}#{tag}"


def axis_of(group: dist.ProcessGroup) -> str:
    """The axis of the layout that a group is made for."""
    return {"default_pg": WORLD, "undefined": OTHER_GROUP, "": OTHER_GROUP}.get(group.group_desc, group.group_desc)
