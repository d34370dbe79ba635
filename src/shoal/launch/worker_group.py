"""The workers of one launch on one machine, from their start to their end.

    rank 1   ── fails [1]
    rank 0   ──────────── loses its peer: an echo [2] ─┐
    launch   ─────────────── sees it ── waits [3] ─────┴─ decides: rank 1 ─ SIGTERM ── grace ── SIGKILL [4] ─ raise

[1] A worker writes its failure to a file with the time before it ends. A worker that is killed writes nothing: the
    exit code and the memory counters of the kernel explain it.
[2] The ranks that wait for a failed one fail, too. Such echoes are often seen first, and never are the cause.
[3] The first failure that is seen need not be the first that happened: an earlier one has SETTLE seconds to appear.
    If all of them are echoes, the cause is still missing, and it has longer.
[4] Every worker leads its own process group, so that SIGKILL also ends what it has started.
A worker that is lost alone may be replaced: see `replacement`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from shoal.comm.shared_board import Board
from shoal.errors import RunFailed, ShoalError, listed
from shoal.launch import shutdown
from shoal.launch.failure import (
    Failure,
    as_exception,
    cause_of,
    first_failure,
    forget_failure,
    read_failure,
    sudden_end,
)
from shoal.launch.host_memory import Memory
from shoal.launch.replacement import Replacement
from shoal.launch.spawner import Spawner
from shoal.launch.stop_signals import queueing_signals
from shoal.launch.watch.reading import is_stopped
from shoal.launch.watch.watcher import Watcher
from shoal.launch.worker import board_path, generation_folder, saved_path, value_path

TURN = 0.2  # seconds between two checks of signals, deadlines and memory; the end of a worker is seen at once
SETTLE = 0.3  # seconds after the first failure in which an earlier one may still be reported
SETTLE_ON_ECHO = 1.5  # the same, when all failures so far are lost peers


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
    fenced: dict[int, Failure] = field(default_factory=dict)
    """Rank → why it was ended. Its replacement begins when the process has ended."""
    replacement: Replacement | None = None
    """Replaces a lost worker; None: all workers end with it."""
    spawner: Spawner | None = None

    @property
    def generation(self) -> int:
        """How often workers of this run were restarted or replaced."""
        return 0 if self.replacement is None else self.replacement.generation

    def start(self, method: str, nproc: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Start the workers."""
        self.spawner = Spawner.of(method, nproc, self.directory, function, args, timeout=self.timeout)
        self._begin_generation(nproc)
        for rank in range(nproc):
            self._start(rank)

    def _start(self, rank: int) -> None:
        """Start the worker of a rank, the first one or its replacement."""
        assert self.spawner is not None
        process = self.spawner.start(rank, self.generation, self.replacement)
        self.processes[rank:] = [process, *self.processes[rank + 1 :]]
        self.running[_end_of(process)] = rank

    def _begin_generation(self, nproc: int) -> None:
        """Make the folder of a generation before any worker opens it."""
        folder = generation_folder(self.directory, self.generation)
        folder.mkdir(mode=0o700)
        Board.create(board_path(folder), nproc)
        of_all = {"first_rank": self.first_rank, "num_ranks": self.world_size}
        self.watcher = Watcher.start(folder, nproc, timeout=self.timeout, turn=TURN, **of_all)

    def watch(self) -> None:
        """Return when all workers have ended, having passed on signals and stopped the siblings of a failed one."""
        first_seen: float | None = None
        while self.running:
            self.memory.look({rank: _pid(self.processes[rank]) for rank in self.running.values()})
            for end in wait(list(self.running), timeout=TURN):
                self._note_end(end)
            self._replace_lost()
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
        if not failures and self.cause is None:
            return
        if self.cause is None and self.passed_on == signal.SIGINT:
            raise KeyboardInterrupt
        if self.cause is None and self.passed_on is not None:
            raise SystemExit(128 + self.passed_on)
        cause = self.cause or _explained_by(self.watcher, first_failure(failures))
        error = self._error_of(cause)
        if isinstance(error, RunFailed):
            error.is_of_replacement = self.replacement is not None and self.replacement.lost is not None
        raise error

    def _error_of(self, cause: Failure) -> ShoalError:
        error = as_exception(cause, directory=self.directory, num_workers=len(self.processes))
        if isinstance(error, RunFailed):
            with contextlib.suppress(OSError, ValueError):
                error.saved_step = int(saved_path(self.directory).read_text())
            error.cause = cause_of(cause)
        return error

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
        if self.spawner is not None:
            self.spawner.close()
        if self.replacement is not None:
            self.replacement.close()

    def receiving_signals(self) -> contextlib.AbstractContextManager[None]:
        """Queue SIGINT and SIGTERM for `watch`."""
        return queueing_signals(self.signals)

    def _note_end(self, end: Any) -> None:
        rank = self.running.pop(end)
        self.stopped.pop(rank, None)
        _close_end(end)
        process = self.processes[rank]
        _kill_group(process)  # [4] remaining children of the worker
        process.join()
        failure = self.fenced.pop(rank, None) or read_failure(self.directory, rank)  # [1]
        if failure is None and not value_path(self.directory, rank).exists():
            failure = sudden_end(rank, process.exitcode or 0, self.memory)
        self.ended[rank] = failure
        if failure is None:
            self.returned.setdefault(rank, time.monotonic())

    # ---- replacement of one worker -----------------------------------------------------------------------------------

    def _replace_lost(self) -> None:
        """Begin to replace a lost worker, or follow its replacement."""
        replacement = self.replacement
        if replacement is None or self.cause is not None or self.passed_on is not None or self.signals:
            return
        for rank in replacement.ranks_to_end(list(self.running.values())):
            self._signal(rank, signal.SIGKILL)
        for rank in replacement.ending & self.ended.keys():
            replacement.ending.discard(rank)
            self._start_again(rank)
        lost = [failure for failure in self.ended.values() if failure is not None]
        if lost and not replacement.is_over:
            others = list(self.running.values())
            why = self._why_not(lost, others)
            if not why and replacement.allows(self._error_of(lost[0])):
                self._replace(lost[0], others)
            else:
                replacement.give_up(why if all(failure.is_lost for failure in lost) else "")
        elif replacement.lost is not None and not lost and (why := replacement.look(range(len(self.processes)))):
            replacement.give_up(why)
            self._end_all(replacement.lost)

    def _why_not(self, lost: list[Failure], others: list[int]) -> str:
        """Why all workers have to restart; empty: the one lost worker can be replaced."""
        assert self.replacement is not None
        if len(lost) > 1:
            return f"ranks {listed([failure.rank for failure in lost])} were lost".replace(" or ", " and ")
        if self.returned or len(others) < len(self.processes) - 1:
            return "a rank has ended its run"
        failed = [rank for rank in others if read_failure(self.directory, rank) is not None]
        return f"rank {failed[0]} has failed, too" if failed else self.replacement.why_not(lost[0], others)

    def _replace(self, failure: Failure, others: list[int]) -> None:
        assert self.replacement is not None
        before, self.deadline = self.watcher if failure.code == "N024" else None, None  # a verdict has all of it
        self._begin_generation(len(self.processes))
        self.replacement.begin(failure, others, lambda: self._error_of(_explained_by(before, failure)))
        self._start_again(failure.rank)

    def _start_again(self, rank: int) -> None:
        del self.ended[rank]
        self.returned.pop(rank, None)
        forget_failure(self.directory, rank)
        value_path(self.directory, rank).unlink(missing_ok=True)
        self.processes[rank].close()
        self._start(rank)

    def _end_all(self, cause: Failure) -> None:
        """Stop all workers for a cause."""
        self.cause, self.deadline = cause, time.monotonic() + self.grace
        if self.replacement is not None:
            self.replacement.give_up("")
        self._signal_all(signal.SIGTERM)

    # ---- causes ------------------------------------------------------------------------------------------------------

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
        self._end_all(_explained_by(self.watcher, candidate))
        for rank in self.stopped:  # a stopped process acts on no other signal
            self._signal(rank, signal.SIGKILL)

    def _fence_hung(self) -> None:
        """End a rank that holds up the others, before they time out."""
        replacement = self.replacement
        is_busy = bool(self.fenced) or (replacement is not None and replacement.is_joining)
        if self.watcher is None or self.cause or self.passed_on or any(self.ended.values()) or is_busy:
            return
        pids = {rank: _pid(self.processes[rank]) for rank in self.running.values() if rank not in self.returned}
        if (found := self.watcher.look(pids)) is None:
            return
        self._signal(found.rank, signal.SIGKILL)
        if replacement is not None and not replacement.is_over:
            if not (why := replacement.why_not(found, [rank for rank in pids if rank != found.rank])):
                self.fenced[found.rank], self.deadline = found, time.monotonic() + self.grace
                return
            replacement.give_up(why if found.is_lost else "")
        self._end_all(found)

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
            limit = shutdown.seconds_for_handlers(self.timeout) + 1.0  # one that can end itself has done so by then
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
        stopped = next((rank for rank in silent if rank in self.stopped), None)
        if not candidate.is_echo or candidate.rank in silent or stopped is None:
            return candidate
        return _was_stopped(stopped, candidate, first_rank=self.first_rank)

    def _pass_on(self, number: int) -> None:
        if self.passed_on is not None:  # a second signal kills
            self._signal_all(signal.SIGKILL)
            return
        self.passed_on = number
        known = self.deadline if self.cause is not None else None  # else it is that of a hung rank alone
        self.deadline = min(known or float("inf"), time.monotonic() + self.grace_period)
        self._signal_all(number)

    def _report_killed(self) -> None:
        if self.passed_on is not None and self.running and not self.is_reported:
            self.is_reported = True
            _print_killed(sorted(self.running.values()), self.passed_on, self.grace_period, self.first_rank)

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


def _explained_by(watcher: Watcher | None, failure: Failure) -> Failure:
    """The failure with what the last collectives of all ranks show."""
    return failure if watcher is None else watcher.explain(failure)


def _was_stopped(rank: int, echo: Failure, *, first_rank: int) -> Failure:
    """The failure of a stopped rank, for which the rank of `echo` has waited."""
    what = f"was stopped by a signal (SIGSTOP), and rank {first_rank + echo.rank} waited for it: {echo.what}"
    return Failure(code="N025", rank=rank, at=echo.at, what=what, is_sudden=True, may_pass=True)


def _print_killed(ranks: list[int], number: int, grace_period: float, first_rank: int) -> None:
    late = f"rank {listed([first_rank + rank for rank in ranks])}".replace(" or ", " and ")
    name = signal.Signals(number).name
    what = f"{late} did not stop within {grace_period:g} s of {name}, and was killed; saved checkpoints remain"
    fix = f"--launch.grace_period {2 * grace_period:g}, or shorter steps"
    print(f"shoal: {what}\n    fix: {fix}", file=sys.stderr, flush=True)


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
