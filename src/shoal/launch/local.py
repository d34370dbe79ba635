"""Start workers on this machine in milliseconds, monitor them, and end them before the call returns.

`torch.multiprocessing.spawn` imports torch again in every worker (two seconds each), needs a port, shows whichever
failure it saw first, and leaves workers behind when it is killed itself. `launch` forks this process, in which torch is
loaded. Its workers connect through a file, it shows the failure that came first, and it leaves nothing behind.

    rank 1   ── fails [1]
    rank 0   ──────────── loses its peer: an echo [2] ─┐
    launch   ─────────────── sees it ── waits [3] ─────┴─ decides: rank 1 ─ SIGTERM ── grace ── SIGKILL [4] ─ raise

[1] A worker writes its failure to a file with the time before it ends. A worker that is killed writes nothing: the
    exit code and the memory counters of the kernel explain it.
[2] The ranks that wait for a failed one fail, too. Such echoes are often seen first, and never are the cause.
[3] The first failure that is seen need not be the first that happened: an earlier one has SETTLE seconds to appear.
    If all of them are echoes, the cause is still missing, and it has longer.
[4] Every worker leads its own process group, so that SIGKILL also ends what it has started.
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
from shoal.launch.failure import Failure, as_exception, cause_of, first_failure, read_failure, sudden_end
from shoal.launch.host_memory import Memory
from shoal.launch.process import is_stopped
from shoal.launch.scratch import scratch_folder
from shoal.launch.watch.watcher import Watcher
from shoal.launch.worker import PASSED_ON, Assignment, board_path, saved_path, value_path, work

T = TypeVar("T")
StartMethod = Literal["auto", "fork", "forkserver", "spawn"]

TURN = 0.2  # seconds between two checks of signals, deadlines and memory; the end of a worker is seen at once
SETTLE = 0.3  # seconds after the first failure in which an earlier one may still be reported
SETTLE_ON_ECHO = 1.5  # the same, when all failures so far are lost peers


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
    """Call `function(placement, store, *args)` in `nproc` workers on this machine; return their values by rank.

    If a worker fails, the others get SIGTERM, and SIGKILL `grace` seconds later. The first failure is raised: a
    ShoalError as it is, anything else as `RunFailed`. Ctrl-C and SIGTERM are forwarded to the workers once. They have
    `grace_period` seconds to return; if they all do, so does `launch`. A second signal, or the end of that period,
    kills them, and KeyboardInterrupt or SystemExit is raised. `start` auto: a fork, unless a fork would break this
    process. A worker also fails if a signal (SIGSTOP) has stopped it for `timeout` seconds, or if it returns more than
    `timeout` seconds after another one.
    """
    method = ("fork" if fork_is_safe() else "forkserver") if start == "auto" else start
    with scratch_folder() as directory:
        group = WorkerGroup(directory=directory, grace=grace, grace_period=grace_period, timeout=timeout)
        try:
            with group.receiving_signals():
                group.start(method, nproc, function, args)
                group.watch()
            group.raise_outcome()
            return [pickle.loads(value_path(directory, rank).read_bytes()) for rank in range(nproc)]
        finally:
            group.kill()


def default_nproc(device: str = "auto") -> int:
    """One worker per GPU, or one without GPUs.

    Without the management library (NVML), torch counts GPUs by starting CUDA, and this process could no longer be
    forked. So a short-lived fork counts them.
    """
    if device == "cpu":
        return 1
    return (_in_a_fork(torch.cuda.device_count) if fork_is_safe() else torch.cuda.device_count()) or 1


def fork_is_safe() -> bool:
    """Whether a forked child of this process can compute.

    A used thread pool of OpenMP is broken in the child: its first parallel loop hangs. Locks of Python's own threads
    are never released there, and CUDA fails. OpenBLAS also has threads, but ends them before a fork. So after a trial
    fork only the threads that matter are left.
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
    first_rank: int = 0
    """The rank of the first of these workers among those of all hosts; all other ranks here are of this host."""
    world_size: int = 0
    """Workers of all hosts; 0: there is one host."""
    processes: list[BaseProcess] = field(default_factory=list)
    running: dict[Any, int] = field(default_factory=dict)
    """Handle that becomes ready at a worker's end → its rank."""
    ended: dict[int, Failure | None] = field(default_factory=dict)
    """Rank → its failure; None: it returned."""
    cause: Failure | None = None
    """The failure that explains the others, decided before the others get SIGTERM."""
    signals: list[int] = field(default_factory=list)
    """Received signals that are still to be handled."""
    passed_on: int | None = None
    is_reported: bool = False
    """Whether workers that did not stop in time have been reported."""
    deadline: float | None = None
    """The time at which remaining workers are killed."""
    returned: dict[int, float] = field(default_factory=dict)
    """Rank → when its value was seen, although its process may still run."""
    stopped: dict[int, float] = field(default_factory=dict)
    """Rank → seconds for which it was seen stopped by a signal, without a break."""
    memory: Memory = field(default_factory=Memory)
    watcher: Watcher | None = None
    """Finds ranks that hang; None: there is no shared memory for heartbeats."""
    lifeline_end: Any = None

    def start(self, method: str, nproc: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start the workers."""
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["torch.distributed"])
        lifeline, self.lifeline_end = context.Pipe(duplex=False)
        key = secrets.token_bytes(32)
        Board.create(board_path(self.directory), nproc)
        self.watcher = Watcher.start(
            self.directory,
            nproc,
            timeout=self.timeout,
            turn=TURN,
            first_rank=self.first_rank,
            num_ranks=self.world_size,
        )
        with lifeline, _signals_blocked():  # until a forked worker has installed its own handlers
            for rank in range(nproc):
                assignment = Assignment(
                    rank=rank,
                    num_workers=nproc,
                    directory=self.directory,
                    lifeline=lifeline,
                    to_close=self.lifeline_end if method == "fork" else None,
                    parent=os.getpid() if method == "fork" else None,
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
            self.memory.look({rank: _pid(self.processes[rank]) for rank in self.running.values()})
            for end in wait(list(self.running), timeout=TURN):
                self._note_end(end)
            self._check_running()
            self._fence_hung()
            if self.signals:
                self._pass_on(self.signals.pop(0))
            if not any(self.ended.values()) and not self._overdue():
                first_seen = None  # a late worker has returned, or a stopped one continues
            elif first_seen is None:
                first_seen = time.monotonic()  # [3] starts
            if first_seen is not None and self.cause is None and self.passed_on is None:
                self._decide_cause(since=first_seen)
            if self.deadline is not None and time.monotonic() > self.deadline:
                self._report_killed()
                self._signal_all(signal.SIGKILL)  # [4]

    def raise_outcome(self) -> None:
        """Raise the cause of the failures; return if every worker returned."""
        failures = [failure for failure in self.ended.values() if failure is not None]
        if not failures:
            return
        if self.cause is None and self.passed_on == signal.SIGINT:
            raise KeyboardInterrupt
        if self.cause is None and self.passed_on is not None:
            raise SystemExit(128 + self.passed_on)
        cause = self.cause or self._with_collectives(first_failure(failures))
        error = as_exception(cause, directory=self.directory, num_workers=len(self.processes))
        if isinstance(error, RunFailed):
            with contextlib.suppress(OSError, ValueError):
                error.saved_step = int(saved_path(self.directory).read_text())
            error.cause = cause_of(cause)
        raise error

    def kill(self) -> None:
        """Kill every remaining worker and wait for its end."""
        self._signal_all(signal.SIGKILL)
        for process in self.processes:
            process.join(self.grace)
            if process.exitcode is None:  # the kernel cannot end it while it waits for a device or a file system
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
        """Queue SIGINT and SIGTERM for `watch`. Only the main thread can; elsewhere handlers stay as they are."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def enqueue(number: int, frame: FrameType | None) -> None:
            self.signals.append(number)

        before = {number: signal.signal(number, enqueue) for number in PASSED_ON}
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
        _kill_group(process)  # [4] remaining children of the worker
        process.join()
        failure = read_failure(self.directory, rank)  # [1]
        if failure is None and not value_path(self.directory, rank).exists():
            failure = sudden_end(rank, process.exitcode or 0, self.memory)
        self.ended[rank] = failure
        if failure is None:
            self.returned.setdefault(rank, time.monotonic())

    def _decide_cause(self, *, since: float) -> None:
        """Decide which failure came first, once no earlier one can appear, and stop the other workers."""
        # [1] a worker that has written its failure may take seconds to end
        written = [read_failure(self.directory, rank) for rank in self.running.values()]
        failures = [failure for failure in (*self.ended.values(), *written, *self._overdue()) if failure is not None]
        if not failures:
            return
        candidate = self._explained(first_failure(failures))  # [2]
        time_to_settle = SETTLE_ON_ECHO if candidate.is_echo else SETTLE  # [3]
        if self.running and time.monotonic() < since + time_to_settle:
            return
        self.cause = self._with_collectives(candidate)
        self.deadline = time.monotonic() + self.grace
        self._signal_all(signal.SIGTERM)
        for rank in self.stopped:  # a stopped process acts on no other signal
            self._signal(rank, signal.SIGKILL)

    def _fence_hung(self) -> None:
        """End a rank that holds up the others, before they time out."""
        if self.watcher is None or self.cause or self.passed_on or any(self.ended.values()):
            return
        pids = {rank: _pid(self.processes[rank]) for rank in self.running.values() if rank not in self.returned}
        self.cause = self.watcher.look(pids)
        if self.cause is not None:
            self._signal(self.cause.rank, signal.SIGKILL)
            self.deadline = time.monotonic() + self.grace
            self._signal_all(signal.SIGTERM)

    def _check_running(self) -> None:
        """Record which workers have returned or are stopped; kill those that do not exit after their return."""
        now = time.monotonic()
        for rank in self.running.values():
            if is_stopped(_pid(self.processes[rank])):
                # Counted in turns, not read from a clock: a signal to all processes of a job stops this one, too.
                self.stopped[rank] = self.stopped.get(rank, 0.0) + TURN
            else:
                self.stopped.pop(rank, None)
            if rank not in self.returned and value_path(self.directory, rank).exists():
                self.returned[rank] = now
            limit = (
                shutdown.seconds_for_handlers(self.timeout) + 1.0
            )  # a worker that can end itself has done so by then
            if now > self.returned.get(rank, now) + limit:
                self._signal(rank, signal.SIGKILL)

    def _overdue(self) -> list[Failure]:
        """Failures of workers that have exceeded the timeout."""
        now, late = time.monotonic(), []
        for rank in self.running.values():
            if self.stopped.get(rank, 0.0) > self.timeout:
                what = f"was stopped by a signal (SIGSTOP) for {self.timeout:g} s, while the other ranks waited"
                late.append(Failure(code="N025", rank=rank, at=now, what=what, is_sudden=True, may_pass=True))
            elif rank not in self.returned and now > min(self.returned.values(), default=now) + self.timeout:
                first = min(self.returned, key=self.returned.__getitem__)
                what = f"had not ended {self.timeout:g} s after rank {self.first_rank + first} had"
                late.append(Failure(code="N026", rank=rank, at=now, what=what, is_sudden=True, may_pass=True))
        return late

    def _explained(self, candidate: Failure) -> Failure:
        """The failure or, for a rank that timed out on a stopped one, the failure of the stopped rank."""
        silent = [rank for rank in self.running.values() if read_failure(self.directory, rank) is None]
        if not candidate.is_echo or candidate.rank in silent or not silent:
            return candidate
        rank = next((rank for rank in silent if rank in self.stopped), None)
        waited = f"rank {self.first_rank + candidate.rank} waited for it: {candidate.what}"
        if rank is not None:
            what = f"was stopped by a signal (SIGSTOP), and {waited}"
            return Failure(code="N025", rank=rank, at=candidate.at, what=what, is_sudden=True, may_pass=True)
        return candidate

    def _with_collectives(self, failure: Failure) -> Failure:
        return failure if self.watcher is None else self.watcher.explain(failure)

    def _pass_on(self, number: int) -> None:
        if self.passed_on is not None:  # a second signal kills
            self._signal_all(signal.SIGKILL)
            return
        self.passed_on = number
        self.deadline = min(self.deadline or float("inf"), time.monotonic() + self.grace_period)
        self._signal_all(number)

    def _report_killed(self) -> None:
        if self.passed_on is None or self.is_reported or not self.running:
            return
        self.is_reported = True
        late = f"rank {listed(sorted(self.running.values()))}".replace(" or ", " and ")
        name = signal.Signals(self.passed_on).name
        what = f"{late} did not stop within {self.grace_period:g} s of {name}, and was killed; saved checkpoints remain"
        fix = f"--launch.grace_period {2 * self.grace_period:g}, or shorter steps"
        print(f"shoal: {what}\n    fix: {fix}", file=sys.stderr, flush=True)

    def _signal_all(self, number: int) -> None:
        """Signal the workers only, which end their own helpers; SIGKILL also goes to all that they started."""
        for rank in self.running.values():
            self._signal(rank, number)

    def _signal(self, rank: int, number: int) -> None:
        """Signal a worker that was not seen to end: afterwards another process may get its pid."""
        if rank not in self.running.values():
            return
        process = self.processes[rank]
        if number == signal.SIGKILL:
            _kill_group(process)
        with contextlib.suppress(ProcessLookupError):
            os.kill(_pid(process), number)


def _end_of(process: BaseProcess) -> Any:
    """A handle that becomes ready when the process ends.

    A process's `sentinel` is a pipe that its children inherit, so it is not ready while one of them runs. A pidfd is.
    """
    return os.pidfd_open(_pid(process)) if hasattr(os, "pidfd_open") else process.sentinel


def _close_end(end: Any) -> None:
    if hasattr(os, "pidfd_open"):
        os.close(end)


def _kill_group(process: BaseProcess) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the worker may not have made its group yet
        os.killpg(_pid(process), signal.SIGKILL)


def _pid(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


def _in_a_fork(count: Callable[[], int]) -> int:
    """A number up to 255 that a forked child counts; 0 if it fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks; `fork_is_safe` tests one
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
