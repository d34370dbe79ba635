"""The coordinator's view of the ranks of all hosts: one verdict over all of them, from what each host reports.

A verdict may be wrong at the moment it is made: a rank can have moved since its report. So it goes to the host of that
rank, which looks at it again before it names or ends it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from shoal.launch.failure import Failure
from shoal.launch.watch.hang_thresholds import Thresholds
from shoal.launch.watch.host_report import Message, readings_of
from shoal.launch.watch.reading import ProcessState, Reading
from shoal.launch.watch.report import problem_of
from shoal.launch.watch.verdict import Verdict, call_of_waiting, find_mismatch, verdict

REST = 10.0
"""Between two verdicts, this many times the time that the last one took: in a large world that may be a second."""


@dataclass(slots=True)
class _Stall:
    """A host none of whose ranks makes progress."""

    beats: Message
    readings: dict[int, Reading]
    states: dict[int, ProcessState]


@dataclass(slots=True)
class AllHosts:
    """What the hosts of one generation have reported of their ranks."""

    _stalls: dict[str, _Stall] = field(default_factory=dict)
    """By the name of the host."""
    _is_judged: bool = True
    _next: float = 0.0
    _left: dict[str, dict[int, Reading]] = field(default_factory=dict)
    """Host → the last readings of its ranks, when one of them had failed."""
    _stacks: dict[int, str] = field(default_factory=dict)

    def note(self, host: str, report: Message) -> None:
        """Note the report of a host."""
        if report["say"] == "stall":
            self._note_stall(host, report)
        elif left := report.get("left"):
            self._left[host] = readings_of(left["beats"])
            self._stacks |= {int(rank): str(stack) for rank, stack in left["stacks"]}

    def _note_stall(self, host: str, report: Message) -> None:
        known = self._stalls.pop(host, None)
        beats = report.get("beats") or (known.beats if known else None)
        if not report["now"] or beats is None:
            return
        readings = readings_of(beats, {int(rank): (age, still) for rank, age, still, _ in report["now"]})
        states = {int(rank): ProcessState(**state) for rank, _, _, state in report["now"]}
        self._stalls[host] = _Stall(beats, readings, states)
        self._is_judged = False

    def verdict(self, hosts: Collection[str], thresholds: Thresholds) -> Verdict | None:
        """The rank that holds up the others; None: no rank does, a rank of these hosts moves, or nothing is new."""
        began = time.monotonic()
        if self._is_judged or began < self._next or not self._stalls.keys() >= set(hosts):
            return None
        self._is_judged = True
        stalls = [self._stalls[host] for host in hosts]
        readings = {rank: reading for stall in stalls for rank, reading in stall.readings.items()}
        states = {rank: state for stall in stalls for rank, state in stall.states.items()}
        places = {rank: host for host in hosts for rank in self._stalls[host].readings}
        found = verdict(readings, states, thresholds, hosts=places)
        self._next = began + REST * (time.monotonic() - began)
        return found

    def explained(self, cause: Failure, *, num_ranks: int, timeout: float) -> Failure:
        """The failure that came first, with what the last collectives of the ranks of all hosts show.

        Ranks that send different sizes may abort on any host, and each host knows the calls of its own ranks alone.
        """
        if not (cause.is_echo or cause.is_sudden) or cause.code == "N057":
            return cause
        readings = {rank: reading for of_host in self._left.values() for rank, reading in of_host.items()}
        if found := find_mismatch(readings, has_other_hosts=len(readings) < num_ranks):
            words = problem_of(found, num_ranks=num_ranks, timeout=timeout)
            what = words.what.removeprefix(f"rank {found.rank} of {num_ranks} ")
            stack = self._stacks.get(found.rank, "")
            return Failure(
                code=words.code,
                rank=found.rank,
                at=cause.at,
                what=what,
                details=stack,
                is_sudden=True,
                fix=words.fix,
            )
        if cause.code != "N024" or " while others were in " in cause.what:
            return cause
        # Which call is the newest, its host alone knows: times of two hosts cannot be compared.
        calls = [str(call) for of_host in self._left.values() if (call := call_of_waiting(of_host, cause.rank))]
        most = Counter(calls).most_common(1)
        return replace(cause, what=f"{cause.what}, while others were in {most[0][0]}") if most else cause
