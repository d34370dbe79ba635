"""The life of one local worker: takes its place, calls the function, leaves behind a value or the story of its failure.

A worker leads a process group of its own, so that Ctrl-C in a terminal reaches only the parent, and so that the helpers
it starts (loader processes) can be ended with it. It never outlives its parent: a thread waits on a pipe whose other
end only the parent holds, and the kernel closes that end however the parent dies.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.comm.rendezvous.environment import Placement
from shoal.launch.failure import failure_of, write_failure
from shoal.launch.shutdown import leave_in_time

_HANG_UP = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)  # nohup has it ignored
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *_HANG_UP)
"""Signals that ask a run to end in good order: of a person, of a scheduler, of Slurm before its time is up, and of a
terminal that is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a worker is told by its parent."""

    rank: int
    num_workers: int
    directory: Path
    """Where the workers meet, and where their values and failures are left."""
    lifeline: Connection
    """Becomes readable when the parent is gone."""
    to_close: Connection | None
    """The parent's end of the lifeline, where a fork has copied it into this process."""
    environ: Mapping[str, str]
    key: bytes = field(repr=False)
    """A secret of this launch, by which the workers know each other's connections."""
    timeout: float | None = None
    """Seconds that any wait of the run may take; None: not known."""


def work(assignment: Assignment, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The main function of a worker process; ends the process itself if anything went wrong."""
    _settle_in(assignment)
    _progress.directory = assignment.directory
    rank, directory = assignment.rank, assignment.directory
    try:
        value = function(_placement(assignment), _store(assignment), *args)
        _write_atomically(value_path(directory, rank), pickle.dumps(value))
        leave_in_time(0, who=f"rank {rank}", timeout=assignment.timeout)
    except BaseException as error:
        write_failure(directory, failure_of(rank, error), error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)  # at once: leaving in good order would wait for threads and connections that may never answer


def note_saved(step: int) -> None:
    """Leave word, as a worker of `launch`, that a step was saved; in any other process, do nothing. Any thread may."""
    with _progress.lock:
        if _progress.directory is not None and step > _progress.newest:
            _progress.newest = step
            with contextlib.suppress(OSError):
                _write_atomically(saved_path(_progress.directory), str(step).encode())


@dataclass
class _Progress:
    """The newest step that this process saved, as a worker of `launch`."""

    directory: Path | None = None
    """None: this process is no worker."""
    newest: int = -1
    lock: threading.Lock = field(default_factory=threading.Lock)


_progress = _Progress()


def saved_path(directory: Path) -> Path:
    """Where the workers leave the newest step that was saved."""
    return directory / "saved-step"


def board_path(directory: Path) -> Path:
    """Where the workers exchange numbers."""
    return directory / "board"


def value_path(directory: Path, rank: int) -> Path:
    """Where a worker leaves what its function returned."""
    return directory / f"value-{rank}.pickle"


def lead_own_group() -> None:
    """Become the leader of a new process group, unless the parent has already made this process one."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def end_with_parent(lifeline: Connection, directory: Path) -> None:
    """From now on this process and the group that it leads end when the other end of the lifeline is closed.

    The directory goes too, since nobody else is left who knows of it.
    """

    def wait_for_the_end() -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                lifeline.recv_bytes()  # nobody ever sends
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, name="lifeline", daemon=True).start()


def _settle_in(assignment: Assignment) -> None:
    lead_own_group()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork inherits the parent's, which pass signals on
    for number in PASSED_ON[1:]:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    if assignment.to_close is not None:
        assignment.to_close.close()
    end_with_parent(assignment.lifeline, assignment.directory)
    os.environ.update(assignment.environ)
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all peers are here, so nobody else needs to reach them


def _placement(assignment: Assignment) -> Placement:
    rank, size = assignment.rank, assignment.num_workers
    return Placement(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        source="shoal",
        key=assignment.key,
        board=board_path(assignment.directory),
    )


def _store(assignment: Assignment) -> dist.Store:
    """A file instead of a port: nothing listens, nothing can be taken, and nobody else can write to it."""
    return dist.FileStore(str(assignment.directory / "store"), assignment.num_workers)


def _write_atomically(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)
