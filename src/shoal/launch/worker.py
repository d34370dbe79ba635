"""The main function of one local worker: it calls the function and writes its value or its failure.

A worker leads a process group of its own. So Ctrl-C in a terminal reaches only the parent, and the helpers of a worker
(loader processes) can be ended with it. A worker never outlives its parent: a thread waits on a pipe whose other end
only the parent has open, and the kernel closes that end however the parent ends. That thread needs the GIL; if it
cannot run, a forked worker is ended by an alarm of the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.comm.heartbeat.heart import heart, start_heart
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.launch.failure import failure_of, write_failure
from shoal.launch.shutdown import leave_in_time
from shoal.launch.stop_signals import STOP_SIGNALS
from shoal.launch.survivor import become_survivor

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The parameters of a worker from its parent."""

    rank: int
    num_workers: int
    directory: Path
    """The folder of the workers' store, values and failures."""
    lifeline: Connection
    """Becomes readable when the parent has ended."""
    to_close: Sequence[Connection]
    """The parent's ends of connections, where a fork has copied them into this process."""
    parent: int | None = None
    """The process that has forked this one; None: the parent is a server of forks."""
    environ: Mapping[str, str]
    key: bytes = field(repr=False)
    """A secret of this launch that authenticates connections between workers."""
    timeout: float | None = None
    """The longest wait of the run in seconds; None: not known."""
    generation: int = 0
    """How often workers of this run were restarted or replaced."""
    orders: Connection | None = None
    """The launcher's orders to leave a generation; None: it replaces no rank."""

    @property
    def folder(self) -> Path:
        """The folder of its generation."""
        return generation_folder(self.directory, self.generation)


def work(assignment: Assignment, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """The main function of a worker process; exits the process after a failure."""
    _set_up(assignment)
    _progress.directory = assignment.directory
    rank, directory = assignment.rank, assignment.directory
    try:
        value = _value(assignment, function, args)
        if (beating := heart()) is not None:
            beating.stop()
        _write_atomically(value_path(directory, rank), pickle.dumps(value))
        leave_in_time(0, name=f"rank {rank}", timeout=assignment.timeout)
    except BaseException as error:
        if (beating := heart()) is not None:
            beating.stop_after_failure()
        write_failure(directory, failure_of(rank, error), error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)  # a normal exit would wait for threads and connections that may never end


def _value(assignment: Assignment, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call the function, and again in the next generation where a lost rank is replaced."""
    survivor = become_survivor(assignment.orders, assignment.generation)
    while True:
        try:
            return function(_placement(assignment), _store(assignment), *args)
        except BaseException as error:
            if survivor is None or not survivor.survives(error):
                raise
        # Here the exception is gone, and with it the frames that refer to the run.
        assignment = replace(assignment, generation=survivor.leave())
        _start_heart(assignment)


def note_saved(step: int) -> None:
    """Record for `launch` that a step was saved; outside of its workers, do nothing. Thread-safe."""
    with _progress.lock:
        if _progress.directory is not None and step > _progress.newest:
            _progress.newest = step
            with contextlib.suppress(OSError):
                _write_atomically(saved_path(_progress.directory), str(step).encode())


@dataclass
class _Progress:
    """The newest step that this worker saved."""

    directory: Path | None = None
    """None: this process is no worker of `launch`."""
    newest: int = -1
    lock: threading.Lock = field(default_factory=threading.Lock)


_progress = _Progress()


def generation_folder(directory: Path, generation: int) -> Path:
    """The folder with the store, the boards and the stacks of a generation."""
    return directory / f"generation-{generation}"


def saved_path(directory: Path) -> Path:
    """The file with the newest saved step."""
    return directory / "saved-step"


def board_path(directory: Path) -> Path:
    """The file in which the workers exchange numbers."""
    return directory / "board"


def heartbeat_path(directory: Path) -> Path:
    """The file in which the workers write their heartbeats."""
    return directory / "heartbeats"


def stack_path(directory: Path, rank: int) -> Path:
    """The file into which a worker writes its stacks."""
    return directory / f"stacks-{rank}.txt"


def value_path(directory: Path, rank: int) -> Path:
    """The file with the return value of a worker."""
    return directory / f"value-{rank}.pickle"


def lead_own_group() -> None:
    """Become the leader of a new process group, unless this process is one already."""
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def end_with_parent(lifeline: Connection, directory: Path) -> None:
    """End this process and its group when the other end of the lifeline closes, and remove the directory."""

    def wait_for_the_end() -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                lifeline.recv_bytes()  # returns only when the parent ends: nothing is ever sent
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, name="lifeline", daemon=True).start()


def end_without_gil(parent: int) -> None:
    """Let the kernel end this process some seconds after `parent`, which has forked it, should the lifeline not do so.

    The kernel sends a signal when the parent ends. Its handler is C's `alarm`, which takes the number of the signal as
    seconds: a handler of Python's would need the GIL, and SIGKILL at once would leave the helpers of this process.
    """
    number = getattr(signal, "SIGSTKFLT", None)
    if number is None:  # another system than Linux
        return
    libc: Any = ctypes.CDLL(None)
    libc.signal(int(number), libc.alarm)
    libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it has ended before the call
        os._exit(1)


def _set_up(assignment: Assignment) -> None:
    if assignment.parent is not None:
        end_without_gil(assignment.parent)
    lead_own_group()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork inherits the parent's, which forward signals
    for number in STOP_SIGNALS[1:]:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    for connection in assignment.to_close:
        connection.close()
    end_with_parent(assignment.lifeline, assignment.directory)
    os.environ.update(assignment.environ)
    _start_heart(assignment)
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all peers are on this host


def _start_heart(assignment: Assignment) -> None:
    start_heart(
        heartbeat_path(assignment.folder),
        index=assignment.rank,
        size=assignment.num_workers,
        stack_file=stack_path(assignment.folder, assignment.rank),
    )


def _placement(assignment: Assignment) -> Placement:
    rank, size = assignment.rank, assignment.num_workers
    return Placement(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        source="shoal",
        key=assignment.key,
        board=board_path(assignment.folder),
        generation=assignment.generation,
    )


def _store(assignment: Assignment) -> dist.Store:
    """A store in a file instead of a port: nothing listens, and no other user can write to it."""
    return dist.FileStore(str(assignment.folder / "store"), assignment.num_workers)


def _write_atomically(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)
