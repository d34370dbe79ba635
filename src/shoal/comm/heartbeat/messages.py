"""Count the point-to-point messages of this rank, which torch's flight recorder leaves out on gloo.

A message between two ranks is like a collective of two: the sender enters it with `send`, the receiver with `recv`. So
each direction between two ranks of a group is a channel with a counter at both ends. The counters are kept at the
three methods of torch's `ProcessGroup` through which Python sends all messages: pipelines, `batch_isend_irecv`, and a
user's `dist.send`. A message costs a microsecond more.

The `Work` of a message says whether it has arrived. Only a weak reference is held, so its tensor is not kept alive; a
`Work` without any other reference was waited for.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shoal.comm.heartbeat.ticket import ANY_SOURCE


class MessageCounter:
    """Channel → messages of this rank. A channel is `group:sender>receiver`, by ranks of the group."""

    def __init__(self) -> None:
        self._entered: dict[tuple[str, int, int], int] = {}
        self._pending: dict[tuple[str, int, int], list[Any]] = {}
        self._by_device: dict[tuple[str, str], int] = {}

    def note(self, group: dist.ProcessGroup, sender: int, receiver: int, work: Any, *, device: str = "cpu") -> None:
        """Count a message that this rank has just started to send or to receive."""
        key = (group.group_name, device)
        self._by_device[key] = self._by_device.get(key, 0) + 1
        channel = (group.group_name, sender, receiver)
        self._entered[channel] = self._entered.get(channel, 0) + 1
        pending = self._pending.setdefault(channel, [])
        pending.append(weakref.ref(work))
        if len(pending) > 64:  # no heartbeat has come by
            pending[:] = [each for each in pending if _is_pending(each)]

    def by_device(self) -> dict[tuple[str, str], int]:
        """Group and kind of device → messages that this rank has sent and received."""
        return dict(self._by_device)

    def counters(self) -> dict[str, tuple[int, int]]:
        """Channel → number of entered and of completed messages."""
        found = {}
        for channel, entered in list(self._entered.items()):
            pending = self._pending[channel]
            pending[:] = [each for each in pending if _is_pending(each)]
            group, sender, receiver = channel
            found[f"{group}:{sender}>{receiver}"] = entered, entered - len(pending)
        return found


def _is_pending(reference: Any) -> bool:
    work = reference()
    try:
        return work is not None and not work.is_completed()
    except RuntimeError:  # it has failed
        return False


def count_messages(counter: MessageCounter) -> Callable[[], None]:
    """Count all messages of this process; return a function that ends it."""
    names = ("send", "recv", "recv_anysource")
    # What getattr returns is not bound to an object when it is set again.
    before = {name: dist.ProcessGroup.__dict__[name] for name in names}

    def counted(original: Any, name: str) -> Any:
        @functools.wraps(original)
        def call(group: dist.ProcessGroup, tensors: Any, *args: Any, **options: Any) -> Any:
            work = original(group, tensors, *args, **options)
            me, device = group.rank(), tensors[0].device.type
            if name == "send":
                counter.note(group, me, args[0] if args else options["dstRank"], work, device=device)
            elif name == "recv":
                counter.note(group, args[0] if args else options["srcRank"], me, work, device=device)
            else:
                counter.note(group, ANY_SOURCE, me, work, device=device)
            return work

        return call

    for name in names:
        setattr(dist.ProcessGroup, name, counted(getattr(dist.ProcessGroup, name), name))

    def end() -> None:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)

    return end
