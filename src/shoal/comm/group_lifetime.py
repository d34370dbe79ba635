"""The end of process groups: cut their connections from another thread, and drop all of them.

A rank that waits in a collective of gloo for a lost one notices only if it was connected to it in that algorithm. The
others wait for their timeout, and gloo has no way to abort (torch 2.13: `abort()` and `shutdown()` return at once, and
the collective stays blocked). But the sockets of a group are visible: they appear in /proc/self/fd while it is created.

    main thread   all_reduce ─ waits ──────────── raises ─ leaves ─ drop_groups ─ new groups ...
    other thread                 cut_groups: shutdown(2) of every connected socket

A socket that listens must not be shut: gloo would end the process. It has no peer, and so it is left out.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from shoal.comm.rendezvous.listener_guard import guarding
from shoal.comm.rendezvous.own_sockets import FOLDER, Socket, open_sockets
from shoal.errors import LostPeer


@dataclass(slots=True)
class _Groups:
    """The groups of this process, and their connections and threads."""

    closed: list[dist.ProcessGroup] = field(default_factory=list)
    """Groups that must not be deallocated before `drop_groups`. Dropping the last reference to a gloo group joins its
    threads. DDP's reducer drops it while it holds the GIL, and a thread that has just finished a collective may wait
    for the GIL. That is a deadlock (torch 2.13, at the end of a run). With this reference, the reducer's is never the
    last."""
    sockets: set[Socket] = field(default_factory=set)
    threads: weakref.WeakSet[threading.Thread] = field(default_factory=weakref.WeakSet)
    is_cut: bool = False


_groups = _Groups()


def keep_after_closing(group: dist.ProcessGroup) -> None:
    """Hold a reference to a group until the process ends or all groups are dropped; see `_Groups.closed`."""
    _groups.closed.append(group)


def note_thread(thread: threading.Thread) -> None:
    """Note a thread that uses groups: it has to end before they are dropped."""
    _groups.threads.add(thread)


@contextmanager
def noting_connections() -> Iterator[None]:
    """Note the sockets that appear during the context, in which groups are created."""
    before = open_sockets()
    try:
        with guarding(before):
            yield
    finally:
        _groups.sockets |= open_sockets() - before


def is_cut() -> bool:
    """Whether the connections of this process were cut: a rank is lost, and waiting for it is in vain."""
    return _groups.is_cut


def can_cut() -> bool:
    """Whether `cut_groups` works for the groups of this process: it was never run for NCCL's."""
    return os.path.isdir(FOLDER) and (not dist.is_initialized() or "nccl" not in dist.get_backend_config())


def cut_groups() -> None:
    """End every collective in which this process waits. Callable from any thread; the groups are of no use after it."""
    _groups.is_cut = True
    if dist.is_initialized() and "nccl" in dist.get_backend_config():
        dist.distributed_c10d._abort_process_group()  # written for NCCL, never run on several GPUs
    for descriptor, _ in _groups.sockets & open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()  # raises for a socket that listens
            connection.shutdown(socket.SHUT_RDWR)


def drop_groups(seconds: float) -> None:
    """Destroy all groups after `cut_groups`, with the memory of what used them. `LostPeer` if a thread does not end.

    The caller has left the `except` block: an exception holds the frames, and these hold the run and its groups.
    """
    deadline = time.monotonic() + seconds
    for thread in list(_groups.threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            what = f"the thread {thread.name!r} has not ended {seconds:g} s after the connections were cut"
            raise LostPeer(what, fix="--launch.recovery restart", code="N036")
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # a run is full of cycles. Its memory is free before the next one is built
    _groups.closed.clear()
    _groups.sockets.clear()
    _groups.is_cut = False
