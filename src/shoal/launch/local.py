"""Workers on this machine: started in milliseconds, watched, and gone when the call returns, whatever happened.

`torch.multiprocessing.spawn` imports torch anew in every worker (two seconds each), needs a port, shows whichever
failure it looked at first, and leaves workers behind when it is killed itself. `launch` forks this process, in which
torch is loaded, lets the workers meet in a file, shows the failure that came first, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

import torch

from shoal.comm.shared_board import Board
from shoal.errors import RunFailed, listed
from shoal.launch import shutdown
from shoal.launch.failure import Failure, Memory, as_exception, first_failure, read_failure, sudden_end
from shoal.launch.process import is_stopped
from shoal.launch.scratch import scratch_folder
from shoal.launch.worker import PASSED_ON, Assignment, board_path, saved_path, value_path, work

T = TypeVar("T")
StartMethod = Literal["auto", "fork", "forkserver", "spawn"]

TURN = 0.2  # seconds between two looks at signals, deadlines and memory; the end of a worker is seen at once
SETTLE = 0.3  # seconds after the first failure in which an earlier one may still come to light
SETTLE_ON_ECHO = 1.5  # the same, when all that is known so far is that somebody lost a peer


def launch(
    function: Callable[..., T],
    args: tuple[Any, ...] = (),
    *,
    nproc: int,
    start: StartMethod = "auto",
    grace: float = 5.0,
    grace_period: float = 30.0,
    timeout: float = 600.0,
) -> list[T]:
    """Call `function(placement, store, *args)` in `nproc` workers on this machine; what they returned, by rank.

    If a worker fails, the others get SIGTERM, `grace` seconds later SIGKILL, and the first failure is raised: a
    ShoalError as it is, anything else as `RunFailed`. Ctrl-C and SIGTERM are passed on to the workers once. They have
    `grace_period` seconds to return; if they all do, so does `launch`. A second signal or the end of patience kills
    them, and KeyboardInterrupt or SystemExit is raised. `start` auto: a fork, unless this process has what a fork
    breaks. A worker fails too if a signal (SIGSTOP) has stopped it for `timeout` seconds, or if it has not returned so
    many seconds after another one has.
    """
    method = ("fork" if fork_is_safe() else "forkserver") if start == "auto" else start
    with scratch_folder() as directory:
        crew = WorkerGroup(directory=directory, grace=grace, grace_period=grace_period, timeout=timeout)
        try:
            with crew.receiving_signals():
                crew.start(method, nproc, function, args)
                crew.watch()
            crew.raise_outcome()
            return [pickle.loads(value_path(directory, rank).read_bytes()) for rank in range(nproc)]
        finally:
            crew.kill()


def default_nproc(device: str = "auto") -> int:
    """One worker per GPU, or a single one without.

    torch counts GPUs by starting CUDA where the management library (NVML) is missing, and then this process could no
    longer be forked. So a short-lived fork counts, and leaves this process as it was.
    """
    if device == "cpu":
        return 1
    return (_in_a_fork(torch.cuda.device_count) if fork_is_safe() else torch.cuda.device_count()) or 1


def fork_is_safe() -> bool:
    """Whether a forked child of this process can compute.

    A thread pool of OpenMP, once used, is broken in the child: its first parallel loop waits for ever. Python's own
    threads may hold locks that nobody will release there, and CUDA refuses. OpenBLAS also has threads, but ends them
    before a fork, so after a trial fork only the ones that matter are left.
    """
    if sys.platform != "linux" or threading.active_count() > 1 or torch.cuda.is_initialized():
        return False
    _in_a_fork(lambda: 0)
    return len(os.listdir("/proc/self/task")) == 1


@dataclass(slots=True, kw_only=True)
class WorkerGroup:
    """The workers of one launch, from their start to their end."""

    directory: Path
    grace: float
    grace_period: float
    timeout: float = 600.0
    processes: list[BaseProcess] = field(default_factory=list)
    running: dict[Any, int] = field(default_factory=dict)
    """What tells of a worker's end → its rank."""
    ended: dict[int, Failure | None] = field(default_factory=dict)
    """Rank → how it failed; None: it did its work."""
    verdict: Failure | None = None
    """The failure that explains the others, fixed before the others are told to stop."""
    signals: list[int] = field(default_factory=list)
    """Signals that this process received and that are still to be passed on or acted upon."""
    passed_on: int | None = None
    is_told: bool = False
    """Whether somebody has been told of workers that did not stop in time."""
    deadline: float | None = None
    """When workers that are still there are killed."""
    returned: dict[int, float] = field(default_factory=dict)
    """Rank → when it was seen that it has left its value, although its process may still be there."""
    stopped: dict[int, float] = field(default_factory=dict)
    """Rank → how many seconds it was seen stopped by a signal, without a break."""
    memory: Memory = field(default_factory=Memory)
    lifeline_end: Any = None

    def start(self, method: str, nproc: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start the workers; they begin at once."""
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["torch.distributed"])
        lifeline, self.lifeline_end = context.Pipe(duplex=False)
        key = secrets.token_bytes(32)
        Board.create(board_path(self.directory), nproc)
        with lifeline, _signals_blocked():  # until a forked worker has put its own handlers in place
            for rank in range(nproc):
                assignment = Assignment(
                    rank=rank,
                    num_workers=nproc,
                    directory=self.directory,
                    lifeline=lifeline,
                    to_close=self.lifeline_end if method == "fork" else None,
                    environ=dict(os.environ) if method == "forkserver" else {},  # the server's own may be out of date
                    key=key,
                    timeout=self.timeout,
                )
                process = context.Process(target=work, args=(assignment, function, args), name=f"rank {rank}")
                process.start()
                self.processes.append(process)
                self.running[_end_of(process)] = rank

    def watch(self) -> None:
        """Return when all workers have ended, having passed on signals and stopped the siblings of a failed one."""
        first_seen: float | None = None
        while self.running:
            self.memory.look()
            for end in wait(list(self.running), timeout=TURN):
                self._note_end(end)
            self._look_at_running()
            if self.signals:
                self._pass_on(self.signals.pop(0))
            if not any(self.ended.values()) and not self._late():
                first_seen = None  # a late worker has returned, or a stopped one continues
            elif first_seen is None:
                first_seen = time.monotonic()
            if first_seen is not None and self.verdict is None and self.passed_on is None:
                self._judge(since=first_seen)
            if self.deadline is not None and time.monotonic() > self.deadline:
                self._say_who_is_late()
                self._signal_all(signal.SIGKILL)

    def raise_outcome(self) -> None:
        """Do nothing if every worker did its work."""
        failures = [failure for failure in self.ended.values() if failure is not None]
        if not failures:
            return
        if self.verdict is None and self.passed_on == signal.SIGINT:
            raise KeyboardInterrupt
        if self.verdict is None and self.passed_on is not None:
            raise SystemExit(128 + self.passed_on)
        verdict = self.verdict or first_failure(failures)
        error = as_exception(verdict, directory=self.directory, num_workers=len(self.processes))
        if isinstance(error, RunFailed):
            with contextlib.suppress(OSError, ValueError):
                error.saved_step = int(saved_path(self.directory).read_text())
            error.cause = "" if verdict.is_sudden else verdict.what
        raise error

    def kill(self) -> None:
        """End every worker that is still there, at once, and wait until it is gone."""
        self._signal_all(signal.SIGKILL)
        for process in self.processes:
            process.join(self.grace)
            if process.exitcode is None:  # the kernel cannot end it: it waits for a device, or for a file system
                print(f"shoal: process {process.pid} ({process.name}) does not end", file=sys.stderr, flush=True)
            else:
                process.close()
        self.processes.clear()
        for end in self.running:
            _close_end(end)
        self.running.clear()
        if self.lifeline_end is not None:
            self.lifeline_end.close()

    @contextlib.contextmanager
    def receiving_signals(self) -> Iterator[None]:
        """Keep SIGINT and SIGTERM for `watch`. Only the main thread can; elsewhere they go where they went before."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def keep(number: int, frame: FrameType | None) -> None:
            self.signals.append(number)

        before = {number: signal.signal(number, keep) for number in PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note_end(self, end: Any) -> None:
        rank = self.running.pop(end)
        self.stopped.pop(rank, None)
        _close_end(end)
        process = self.processes[rank]
        _kill_group(process)  # what the worker started and did not end
        process.join()
        failure = read_failure(self.directory, rank)
        if failure is None and not value_path(self.directory, rank).exists():
            failure = sudden_end(rank, process.exitcode or 0, self.memory)
        self.ended[rank] = failure
        if failure is None:
            self.returned.setdefault(rank, time.monotonic())

    def _judge(self, *, since: float) -> None:
        """Decide which failure came first, as soon as no earlier one can come to light, and stop the others."""
        written = [read_failure(self.directory, rank) for rank in self.running.values()]
        failures = [failure for failure in (*self.ended.values(), *written, *self._late()) if failure is not None]
        if not failures:
            return
        candidate = self._explained(first_failure(failures))
        time_to_settle = SETTLE_ON_ECHO if candidate.is_echo else SETTLE
        if self.running and time.monotonic() < since + time_to_settle:
            return
        self.verdict = candidate
        self.deadline = time.monotonic() + self.grace
        self._signal_all(signal.SIGTERM)
        for rank in self.stopped:  # which do not act on any other signal
            self._signal(rank, signal.SIGKILL)

    def _look_at_running(self) -> None:
        """Note which workers have returned a value, and which are stopped; end those that do not leave."""
        now = time.monotonic()
        for rank in self.running.values():
            if is_stopped(_pid(self.processes[rank])):
                # Counted, not read from a clock: a signal to all processes of a job stops this one, too.
                self.stopped[rank] = self.stopped.get(rank, 0.0) + TURN
            else:
                self.stopped.pop(rank, None)
            if rank not in self.returned and value_path(self.directory, rank).exists():
                self.returned[rank] = now
            if (
                now > self.returned.get(rank, now) + shutdown.seconds_for_handlers(self.timeout) + 1.0
            ):  # it cannot even end itself
                self._signal(rank, signal.SIGKILL)

    def _late(self) -> list[Failure]:
        """Workers that have used up the timeout."""
        now, late = time.monotonic(), []
        for rank in self.running.values():
            if self.stopped.get(rank, 0.0) > self.timeout:
                what = (
                    f"was stopped by a signal (SIGSTOP) for {self.timeout:g} s, in which the other ranks waited for it"
                )
                late.append(Failure(rank=rank, at=now, what=what, is_sudden=True, may_pass=True))
            elif rank not in self.returned and now > min(self.returned.values(), default=now) + self.timeout:
                first = min(self.returned, key=self.returned.__getitem__)
                what = f"had not ended {self.timeout:g} s after rank {first} had"
                late.append(Failure(rank=rank, at=now, what=what, is_sudden=True, may_pass=True))
        return late

    def _explained(self, candidate: Failure) -> Failure:
        """The failure, or, if it is that of a rank that waited in vain, the rank that it waited for."""
        silent = [rank for rank in self.running.values() if read_failure(self.directory, rank) is None]
        if not candidate.is_echo or candidate.rank in silent or not silent:
            return candidate
        rank = next((rank for rank in silent if rank in self.stopped), None)
        waited = f"rank {candidate.rank} waited for it: {candidate.what}"
        if rank is not None:
            what = f"was stopped by a signal (SIGSTOP), and {waited}"
            return Failure(rank=rank, at=candidate.at, what=what, is_sudden=True, may_pass=True)
        return candidate

    def _pass_on(self, number: int) -> None:
        if self.passed_on is not None:  # the second time a person means it
            self._signal_all(signal.SIGKILL)
            return
        self.passed_on = number
        self.deadline = min(self.deadline or float("inf"), time.monotonic() + self.grace_period)
        self._signal_all(number)

    def _say_who_is_late(self) -> None:
        if self.passed_on is None or self.is_told or not self.running:
            return
        self.is_told = True
        late = f"rank {listed(sorted(self.running.values()))}".replace(" or ", " and ")
        name = signal.Signals(self.passed_on).name
        what = f"{late} did not stop within {self.grace_period:g} s of {name}, and was killed; what is saved stays"
        print(f"shoal: {what}\n    fix: a longer --launch.grace_period, or shorter steps", file=sys.stderr, flush=True)

    def _signal_all(self, number: int) -> None:
        """To the workers alone, since their helpers are theirs to end; but SIGKILL to everything they started."""
        for rank in self.running.values():
            self._signal(rank, number)

    def _signal(self, rank: int, number: int) -> None:
        """Only to a worker that was not seen to end: afterwards another process may get its number."""
        if rank not in self.running.values():
            return
        process = self.processes[rank]
        if number == signal.SIGKILL:
            _kill_group(process)
        with contextlib.suppress(ProcessLookupError):
            os.kill(_pid(process), number)


def _end_of(process: BaseProcess) -> Any:
    """Something to wait on that becomes ready when the process ends.

    A process's `sentinel` is a pipe that its own children inherit, so it stays silent while one of them lives; a pidfd
    of the kernel does not.
    """
    return os.pidfd_open(_pid(process)) if hasattr(os, "pidfd_open") else process.sentinel


def _close_end(end: Any) -> None:
    if hasattr(os, "pidfd_open"):
        os.close(end)


def _kill_group(process: BaseProcess) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # no such group: the worker had not yet made it
        os.killpg(_pid(process), signal.SIGKILL)


def _pid(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


def _in_a_fork(count: Callable[[], int]) -> int:
    """A number up to 255 that a forked child counts; 0 if it fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of what `fork_is_safe` tries out
        child = os.fork()
    if child == 0:
        counted = 0
        try:
            counted = count()
        finally:
            os._exit(counted)
    return max(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
