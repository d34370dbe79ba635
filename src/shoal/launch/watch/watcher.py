"""The supervisor's view of all its workers: read the board, keep clocks, and turn a verdict into a failure.

Its clock counts turns: a turn adds at most twice its usual length. So a signal that stops the whole job, a laptop that
sleeps, or a machine too busy to run the supervisor do not count as waiting.

Of a run on several hosts it sees the ranks of its own, and judges what they show. The coordinator judges all ranks,
from what the watchers report to it, and the watcher of the rank that hangs acts on it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.comm.heartbeat.board import HeartbeatBoard
from shoal.errors import Problem
from shoal.launch.failure import Failure, read_failure
from shoal.launch.watch.hang_thresholds import Thresholds
from shoal.launch.watch.host_report import Message, StallReporter, plain_beats
from shoal.launch.watch.reading import ProcessState, Reading, cpu_of_descendants, progress_of, read_state
from shoal.launch.watch.report import problem_of
from shoal.launch.watch.stacks import excerpt, is_debugged, outliers, stack_of, stack_of_traceback
from shoal.launch.watch.verdict import Verdict, call_of_waiting, find_mismatch, verdict
from shoal.launch.worker import heartbeat_path, stack_path

SUSPECT = 0.5
"""Seconds without progress from which the descendants of a rank are read."""
ASK_AGAIN = 30.0
"""Seconds after which it is checked whether a rank is still in a debugger."""
LEAD = 1.0
"""Seconds for which the coordinator's verdict is waited for: it knows the ranks of all hosts, if none of them moves."""
TOLERANCE = 0.25
"""Seconds by which two ways to count a stall may differ."""


@dataclass(slots=True)
class _Seen:
    """What was last seen of a rank, and when on the watcher's clock."""

    state: Any = None
    changed: float = 0.0
    beat: float = 0.0
    beat_at: float = 0.0
    cpu: tuple[float, float] | None = None
    """Clock and CPU seconds at the first look after the last change."""
    helpers: tuple[float, float] | None = None
    """Clock and CPU seconds of its descendants when a stall was first suspected."""
    stopped: float = 0.0


@dataclass(slots=True)
class Watcher:
    """Watches the workers of one launch. `turn`: seconds between two looks."""

    directory: Path
    board: HeartbeatBoard
    first_rank: int
    """The rank, among those of all hosts, of the first worker of this one."""
    num_ranks: int
    """Of all hosts."""
    thresholds: Thresholds
    turn: float
    reporter: StallReporter | None = None
    """Reports stalls to the coordinator; None: there is one host."""
    accused: Verdict | None = None
    """The coordinator's verdict on a rank of this host, for the next look."""
    clock: float = 0.0
    _last_look: float = 0.0
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _named: tuple[Any, ...] = ()
    """The last verdict that was reported without ending the rank."""
    _held: tuple[Any, float] = None, 0.0
    """The last verdict over the ranks of this host, and since when it holds."""
    _debugged_until: float = 0.0
    """On the clock: until then, the stack of a rank that was in a debugger is not read again."""

    @classmethod
    def start(
        cls, directory: Path, num_local: int, *, timeout: float, turn: float, first_rank: int = 0, num_ranks: int = 0
    ) -> Watcher | None:
        """Create the board of heartbeats; None if there is no room for it. `num_ranks` 0: there is one host."""
        board = HeartbeatBoard.create(heartbeat_path(directory), num_local)
        if board is None:
            return None
        return cls(directory, board, first_rank, num_ranks or num_local, Thresholds(timeout), turn)

    def look(self, pids: Mapping[int, int]) -> Failure | None:
        """Look at all running workers, by their number on this host; return the failure of one that is to be ended."""
        now = time.monotonic()
        self.clock += min(now - (self._last_look or now), 2 * self.turn)
        self._last_look = now
        beats = {index: beat for index in pids if (beat := self.board.read(index)) is not None}
        if len(beats) < len(pids):  # a worker has not started to beat
            return None
        readings, states = {}, {}
        for index, beat in beats.items():
            rank = self.first_rank + index
            states[rank], readings[rank] = self._look_at(index, pids[index], beat)
        if self.reporter is not None:
            ranks = {rank: (readings[rank], states[rank]) for rank in readings}
            self.reporter.look(self.clock, {self.first_rank + index: beat for index, beat in beats.items()}, ranks)
        found = self._accused(readings) or self._judged_here(readings, states)
        return None if found is None else self._act(found, {self.first_rank + index: pids[index] for index in pids})

    @property
    def _has_other_hosts(self) -> bool:
        return self.num_ranks > self.board.size

    def _judged_here(self, readings: Mapping[int, Reading], states: Mapping[int, ProcessState]) -> Verdict | None:
        """The verdict over the ranks of this host; with other hosts, once it has held for a moment."""
        found = verdict(readings, states, self.thresholds, has_other_hosts=self._has_other_hosts)
        key = None if found is None else (found.kind, found.rank, found.is_final)
        if key != self._held[0]:
            self._held = key, self.clock
        return found if not self._has_other_hosts or self.clock >= self._held[1] + LEAD else None

    def _accused(self, readings: Mapping[int, Reading]) -> Verdict | None:
        """The coordinator's verdict, unless the rank has moved since the report from which it was made."""
        found, self.accused = self.accused, None
        if found is None or found.rank not in readings:
            return None
        return found if readings[found.rank].still >= found.waited - TOLERANCE else None

    def _look_at(self, index: int, pid: int, beat: dict[str, Any]) -> tuple[ProcessState, Reading]:
        seen = self._seen.setdefault(index, _Seen(changed=self.clock, beat_at=self.clock))
        if beat["beat"] != seen.beat:
            seen.beat, seen.beat_at = beat["beat"], self.clock
        now = progress_of(beat)
        if now != seen.state:  # the rank makes progress: the state of its process explains nothing
            seen.state, seen.changed, seen.cpu, seen.helpers, seen.stopped = now, self.clock, None, None, 0.0
            return ProcessState(), Reading.parse(beat, age=self.clock - seen.beat_at, still=0.0)
        state = read_state(pid)
        seen.stopped = seen.stopped + self.turn if state.letter == "T" else 0.0
        still = self.clock - seen.changed
        since, before = seen.cpu = seen.cpu or (self.clock, state.cpu_seconds)
        busy = (state.cpu_seconds - before) / (self.clock - since) if self.clock > since else 0.0
        busy += self._busy_helpers(seen, pid) if still >= SUSPECT else 0.0
        reading = Reading.parse(beat, age=self.clock - seen.beat_at, still=still)
        return replace(state, busy=busy, stopped=seen.stopped), reading

    def _busy_helpers(self, seen: _Seen, pid: int) -> float:
        """The fraction of the time in which the descendants of a rank computed, since it was suspected to hang."""
        cpu = cpu_of_descendants(pid)
        since, before = seen.helpers = seen.helpers or (self.clock, cpu)
        return (cpu - before) / (self.clock - since) if self.clock > since else 0.0

    def _act(self, found: Verdict, pids: Mapping[int, int]) -> Failure | None:
        """Name the rank once, and return its failure if it is to be ended."""
        # A slow link is named once, not in each call.
        key = (found.kind, found.rank, None if found.kind == "network" else found.call)
        if not found.is_final and key == self._named:
            return None
        if self.clock < self._debugged_until and found.waited < self.thresholds.timeout:
            return None
        before = self._progress(pids)
        if found.kind in ("order", "network") and pids.keys() >= set(found.waiting):
            found = self._by_stacks(found, pids)
        stack = stack_of(pids[found.rank], self._stack_path(found.rank), is_stopped=found.kind == "stopped")
        if found.waited < self.thresholds.timeout and is_debugged(stack):
            self._named, self._debugged_until = key, self.clock + ASK_AGAIN
            return None
        if found.is_final and self._has_moved(found, before, pids):
            return None
        words = self._words(found)
        details = f"  stack of rank {found.rank}:{excerpt(stack)}" if stack else ""
        if found.is_final:
            return Failure(
                code=words.code,
                rank=found.rank - self.first_rank,
                at=time.monotonic(),
                what=words.what.removeprefix(f"rank {found.rank} of {self.num_ranks} "),
                details=details,
                is_sudden=True,
                may_pass=found.kind not in ("mismatch", "alone", "order"),
                is_lost=found.kind in ("stopped", "gil", "never_entered"),
                fix=words.fix,
            )
        self._named = key
        what = f"{words.what}\n{details}" if details else words.what
        print(f"shoal: {replace(words, what=what)}", file=sys.stderr, flush=True)
        return None

    def _progress(self, pids: Mapping[int, int]) -> list[Any]:
        beats = [self.board.read(rank - self.first_rank) for rank in sorted(pids)]
        return [progress_of(beat) for beat in beats if beat is not None]

    def _has_moved(self, found: Verdict, before: list[Any], pids: Mapping[int, int]) -> bool:
        """Whether a rank made progress while stacks were read, which may take seconds.

        A stopped rank was continued for its stack and stopped again, which takes a moment. So its state decides.
        """
        if found.kind == "stopped":
            deadline = time.monotonic() + 1.0
            while (letter := read_state(pids[found.rank]).letter) != "T" and time.monotonic() < deadline:
                time.sleep(0.01)
            return letter != "T"
        return self._progress(pids) != before

    def _words(self, found: Verdict) -> Problem:
        return problem_of(found, num_ranks=self.num_ranks, timeout=self.thresholds.timeout)

    def _by_stacks(self, found: Verdict, pids: Mapping[int, int]) -> Verdict:
        """Where counters name no single rank, the one whose stack differs from most."""
        stacks = {rank: stack_of(pid, self._stack_path(rank)) for rank, pid in pids.items()}
        odd = outliers(stacks)
        return replace(found, rank=odd[0]) if len(odd) == 1 else found

    def explain(self, failure: Failure) -> Failure:
        """Add to a failure what the last collectives of all ranks show.

        If ranks send different sizes, gloo ends a process by abort(), often not the one that made the mistake. If a
        rank is killed, those that waited for it know in which collective.
        """
        if not (failure.is_echo or failure.is_sudden):
            return failure
        beats = {index: beat for index in range(self.board.size) if (beat := self.board.read(index)) is not None}
        readings = {self.first_rank + index: Reading.parse(beat, age=0.0, still=0.0) for index, beat in beats.items()}
        if found := find_mismatch(readings, has_other_hosts=self._has_other_hosts):
            words = self._words(found)
            stack = self._left_stack(found.rank)
            return Failure(
                code=words.code,
                rank=found.rank - self.first_rank,
                at=failure.at,
                what=words.what.removeprefix(f"rank {found.rank} of {self.num_ranks} "),
                details=stack,
                is_sudden=True,
                fix=words.fix,
            )
        own = readings.get(self.first_rank + failure.rank)
        failure = replace(failure, phase=own.phase if own else "")
        call = call_of_waiting(readings, self.first_rank + failure.rank)
        return replace(failure, what=f"{failure.what}, while others were in {call}") if call else failure

    def left(self) -> Message:
        """What the ranks of this host have left, for a comparison with those of other hosts: calls and stacks."""
        beats = {index: beat for index in range(self.board.size) if (beat := self.board.read(index)) is not None}
        ranks = {self.first_rank + index: beat for index, beat in beats.items()}
        return {"beats": plain_beats(ranks), "stacks": [[rank, self._left_stack(rank)] for rank in ranks]}

    def _left_stack(self, rank: int) -> str:
        """The stack that an aborting rank has written, or the traceback of one that lost its peers by their abort."""
        stack = ""
        with suppress(OSError):
            stack = excerpt(self._stack_path(rank).read_text())
        if not stack and (failure := read_failure(self.directory, rank - self.first_rank)):
            stack = excerpt(stack_of_traceback(failure.details))
        return f"  stack of rank {rank}:{stack}" if stack else ""

    def _stack_path(self, rank: int) -> Path:
        return stack_path(self.directory, rank - self.first_rank)
