"""Say which rank hangs, and where: a pure function of what is known of all ranks.

Each rank enters the collectives of a group in the same order, so two counters per group show which rank waits for
which. Rank a waits for rank b if a has entered a collective that has not completed, and b has not entered it:

    rank 0   dp #118 entered                      waits for 2
    rank 1   dp #118 entered                      waits for 2
    rank 3   dp #118 done, tp #42 entered         waits for 1
    rank 2   dp #117 done                         waits for no rank: the culprit

The culprit is a rank for which others wait, and which waits for none itself. A message between two ranks is a
collective of two. Rows of the table, in this order:

| seen                                                 | verdict                                             |
|------------------------------------------------------|-----------------------------------------------------|
| state T, and another rank waits or is elsewhere      | stopped                                             |
| two ranks have different calls under one number      | mismatch: the rank in the minority                  |
| culprit, heartbeat old                               | holds the GIL                                       |
| culprit, state D                                     | blocked in the kernel                               |
| culprit, heartbeat fresh                             | never entered                                       |
| ranks wait for each other in two calls, one unusual  | alone: the other ranks never enter that one         |
| ranks wait for each other in a circle                | order: they entered two groups in different orders  |
| all have entered the same call, and it does not end  | network                                             |
| anything moves, or no rank waits                     | none                                                |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from shoal.comm.heartbeat.board import UNKNOWN
from shoal.comm.heartbeat.ticket import ANY_SOURCE, Ticket, group_of
from shoal.launch.watch.hang_thresholds import STEP, Thresholds
from shoal.launch.watch.lone_call import lone_call
from shoal.launch.watch.reading import ProcessState, Reading

Kind = Literal["stopped", "mismatch", "gil", "kernel", "never_entered", "alone", "order", "network"]

BUSY = 0.2
"""Fraction of the time from which a rank counts as computing. Heartbeat and idle threads use less than a hundredth."""
SAME_ON_ALL = {"all_reduce", "broadcast", "reduce", "all_gather", "allgather", "_allgather_base", "reduce_scatter"}
"""Operations whose inputs have the same sizes on all ranks. Those of all_to_all, gather and scatter may differ."""
BACKGROUND = "background"
"""The axis of a group with which a thread saves while training continues."""
OLD_BEAT = 2.0
"""Seconds after which a missing heartbeat means that its thread cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective, or a message, that did not complete."""

    channel: str
    number: int
    axis: str
    operation: str
    inputs: str = ""

    def __str__(self) -> str:
        if self.channel == "board":
            return f"exchange #{self.number} of the step's numbers"
        return f"{self.operation} #{self.number} of {self.axis}" + (f" ({self.inputs})" if self.inputs else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A rank that hangs."""

    kind: Kind
    rank: int
    call: Call | None = None
    """The one in which the others wait."""
    waited: float = 0.0
    waiting: tuple[int, ...] = ()
    is_final: bool = True
    """True: the rank is to be ended. False: it is named, and may continue."""
    versions: tuple[tuple[tuple[int, ...], str], ...] = ()
    """Of a mismatch or a circle: ranks and their call, the most common first."""
    wchan: str = ""
    phase: str = "step"


def verdict(
    readings: Mapping[int, Reading],
    states: Mapping[int, ProcessState],
    thresholds: Thresholds,
    *,
    has_other_hosts: bool = False,
    hosts: Mapping[int, str] | None = None,
) -> Verdict | None:
    """The rank that holds up the others; None: no rank does, or it is too early to say.

    `has_other_hosts`: there are ranks that are not in `readings`. `hosts`: rank → host; None: all are on one.
    """
    known = _Known(readings, states, thresholds, has_other_hosts, hosts or {})
    if any(state.is_traced for state in states.values()):
        return None  # a debugger is attached to one rank, and the others wait for its user
    return known.stopped() or known.mismatch() or known.culprit() or known.circle() or known.network()


@dataclass(frozen=True, slots=True)
class _Known:
    readings: Mapping[int, Reading]
    states: Mapping[int, ProcessState]
    thresholds: Thresholds
    has_other_hosts: bool
    hosts: Mapping[int, str]

    def stopped(self) -> Verdict | None:
        """A rank in state T, while another one waits. If all are stopped, the user has paused the run."""
        limit = self.thresholds.stopped
        halted = [rank for rank, state in self.states.items() if state.stopped >= limit]
        others = [rank for rank in self.readings if rank not in halted]
        waiting = [rank for rank in others if any(self._pending(rank))]
        if not halted or not waiting or self._still(others) < limit / 2:
            return None
        rank = halted[0]
        call = self._call_waited_for(waiting, rank)
        waited = self.states[rank].stopped
        return Verdict(kind="stopped", rank=rank, call=call, waited=waited, waiting=tuple(waiting))

    def mismatch(self) -> Verdict | None:
        """Two ranks with different calls under the same number of a group."""
        waited = self._still(self.readings)
        if waited < self.thresholds.stopped:
            return None
        found = find_mismatch(self.readings, has_other_hosts=self.has_other_hosts)
        if found is None:
            return None
        phases = {self.readings[rank].phase for ranks, _ in found.versions for rank in ranks}
        if phases == {STEP}:
            return found
        if waited < max(self.thresholds.named(phase, self._median()) for phase in phases):
            return None
        phase = sorted(phases - {STEP})[0]
        return replace(found, is_final=waited >= self.thresholds.last, phase=phase)

    def culprit(self) -> Verdict | None:
        """A rank for which others wait, and which waits for none."""
        edges = self._edges()
        for rank in self._roots(edges) or self._awake(edges):
            waiting = tuple(sorted({waiter for waiter, late, _ in edges if late == rank}))
            call = self._call_waited_for(waiting, rank)
            if found := self._judged(rank, waiting, call):
                return found
        return None

    def _roots(self, edges: list[tuple[int, int, str]]) -> list[int]:
        """The ranks for which others wait, and which wait for none. A rank without heartbeat has old counters."""
        waiting = {waiter for waiter, _, _ in edges if self.readings[waiter].age < OLD_BEAT}
        late = {late for _, late, _ in edges} - waiting
        return sorted(rank for rank in late if self.readings[rank].age > OLD_BEAT or not self._may_wait_otherwise(rank))

    def _may_wait_otherwise(self, rank: int) -> bool:
        """Whether a rank for which others wait may itself wait for something else than a rank that is seen.

        It may still receive over a slow link what another rank has sent, which has continued: then it is not asleep.
        """
        receives = any(self._is_between_hosts(name) for name in self._pending(rank) if self._axis(name) != BACKGROUND)
        return receives or self._may_wait_elsewhere(rank)

    def _is_between_hosts(self, channel: str) -> bool:
        return len({self.hosts.get(rank) for rank in self._ranks(channel)}) > 1

    def _axis(self, channel: str) -> str:
        name = group_of(channel)
        return next((each.groups[name][0] for each in self.readings.values() if name in each.groups), "")

    def _awake(self, edges: list[tuple[int, int, str]]) -> list[int]:
        """The one rank of a circle that does not sleep on a lock. It has started to receive, and went elsewhere.

        A thread that waits for a collective or a message sleeps on a lock (a futex) in gloo and NCCL.
        """
        late = {late for _, late, _ in edges}
        awake = [rank for rank in late if not self._state(rank).wchan.startswith("futex")]
        is_one = len(awake) == 1 and len(late) > 1
        return awake if is_one and not self._may_wait_elsewhere(awake[0]) else []

    def _state(self, rank: int) -> ProcessState:
        return self.states.get(rank, ProcessState())

    def _may_wait_elsewhere(self, rank: int) -> bool:
        """Whether a rank is in a call that a rank of another host may not have entered."""
        return not all(self._is_seen(channel) for channel in self._pending(rank))

    def _judged(self, rank: int, waiting: tuple[int, ...], call: Call | None) -> Verdict | None:
        reading, state = self.readings[rank], self._state(rank)
        median = max(each.median_step for each in self.readings.values())
        waited = self._still(self.readings)
        is_blocked = state.letter == "D"
        may_pass = is_blocked or reading.uses_gpu or state.letter == "R" or state.busy > BUSY
        holds_gil = reading.age > OLD_BEAT and not may_pass
        if waited < self.thresholds.named(reading.phase, median, holds_gil=holds_gil):
            return None
        kind: Kind = "kernel" if is_blocked else "gil" if reading.age > OLD_BEAT else "never_entered"
        return Verdict(
            kind=kind,
            rank=rank,
            call=call,
            waited=waited,
            waiting=waiting,
            is_final=waited >= self.thresholds.ended(reading.phase, median, may_pass=may_pass, holds_gil=holds_gil),
            wchan=state.wchan,
            phase=reading.phase,
        )

    def circle(self) -> Verdict | None:
        """Ranks that wait for each other."""
        edges = self._edges()
        waiting = sorted({waiter for waiter, _, _ in edges})
        is_closed = {late for _, late, _ in edges} <= set(waiting) and not any(map(self._may_wait_elsewhere, waiting))
        if not waiting or not is_closed or not self._is_late(waiting):
            return None
        channels = {each: next(channel for waiter, _, channel in edges if waiter == each) for each in waiting}
        calls = {each: self._call(channels[each], each) for each in waiting}
        versions = _versions({each: str(call) for each, call in calls.items()})
        waited = self._still(self.readings)
        alone = lone_call({each: (call.channel, call.number) for each, call in calls.items()}, self.readings)
        if alone is not None:
            inside = tuple(each for each in waiting if (calls[each].channel, calls[each].number) == alone)
            call = calls[inside[0]]
            return Verdict(kind="alone", rank=inside[0], call=call, waited=waited, waiting=inside, versions=versions)
        return Verdict(kind="order", rank=waiting[0], waited=waited, waiting=tuple(waiting), versions=versions)

    def network(self) -> Verdict | None:
        """All ranks have entered the same call, and it does not complete."""
        stuck = [(rank, channel) for rank in self.readings for channel in self._pending(rank) if self._is_seen(channel)]
        members = {rank for rank, _ in stuck}
        if not stuck or members != set(self.readings) or not self._is_late(members):
            return None
        if any(map(self._may_wait_elsewhere, members)):  # then this call may wait for that one
            return None
        # A rank that has sent its part may be in the next call: what has not ended is the one before.
        begun = ((rank, channel) for rank, channel in stuck if not self._late_for(rank, channel))
        rank, channel = next(begun, stuck[0])
        waited = self._still(self.readings)
        limits, phase = self.thresholds, self.readings[rank].phase
        is_slow = self._is_between_hosts(channel)  # the link between two hosts may be, and the call much data
        if is_slow and waited < limits.slow_link:
            return None
        is_final = waited >= (limits.last if is_slow else limits.ended(phase, self._median(), may_pass=True))
        call = self._call(channel, rank)
        waiting = tuple(sorted(members))
        return Verdict(kind="network", rank=rank, call=call, waited=waited, waiting=waiting, is_final=is_final)

    def _is_seen(self, channel: str) -> bool:
        """Whether all ranks of a channel are watched: none has ended, is on another host, or may be any rank."""
        ranks = self._ranks(channel)
        is_any = f":{ANY_SOURCE}>" in channel
        return bool(ranks) and not is_any and all(rank in self.readings for rank in ranks)

    def _is_late(self, ranks: Iterable[int]) -> bool:
        limit = max(self.thresholds.named(self.readings[rank].phase, self._median()) for rank in ranks)
        return self._still(self.readings) >= limit

    def _median(self) -> float:
        return max(each.median_step for each in self.readings.values())

    def _still(self, ranks: Iterable[int]) -> float:
        """Seconds in which none of these ranks made progress."""
        return min((self.readings[rank].still for rank in ranks), default=0.0)

    def _pending(self, rank: int) -> Iterator[str]:
        """The channels in which a rank has entered a call that has not completed."""
        return (channel for channel, (entered, done) in self.readings[rank].counters.items() if entered > done)

    def _edges(self) -> list[tuple[int, int, str]]:
        """Who waits for whom, and in which channel."""
        return [
            (rank, other, channel)
            for rank in self.readings
            for channel in self._pending(rank)
            for other in self._late_for(rank, channel)
        ]

    def _late_for(self, rank: int, channel: str) -> list[int]:
        """The ranks that have not entered the call in which a rank waits."""
        number = self._first_pending(rank, channel)
        return [other for other in self._members(channel) if other != rank and self._is_behind(other, channel, number)]

    def _first_pending(self, rank: int, channel: str) -> int:
        return self.readings[rank].counters[channel][1] + 1

    def _is_behind(self, rank: int, channel: str, number: int) -> bool:
        reading = self.readings[rank]
        is_known = channel in reading.counters or not reading.is_partial
        return reading.phase != UNKNOWN and is_known and self._entered(rank, channel) < number

    def _entered(self, rank: int, channel: str) -> int:
        return self.readings[rank].counters.get(channel, (0, 0))[0]

    def _members(self, channel: str) -> Iterator[int]:
        """The watched ranks of a channel."""
        return (rank for rank in self._ranks(channel) if rank in self.readings)

    def _ranks(self, channel: str) -> tuple[int, ...]:
        """The ranks of a channel; empty: they are not known."""
        if channel == "board":  # of ranks on one host
            return tuple(self.readings)
        name, ends = group_of(channel), channel.partition(":")[2]
        ranks = next((each.groups[name][1] for each in self.readings.values() if name in each.groups), ())
        if ends:
            places = [int(place) for place in ends.split(">")]
            ranks = tuple(ranks[place] for place in places if 0 <= place < len(ranks))
        return ranks

    def _call_waited_for(self, waiting: Iterable[int], late: int) -> Call | None:
        """The call of the waiting ranks that the late one has not entered: of training, before one of a thread that
        saves meanwhile; and a group's before the board's."""
        calls = [
            self._call(channel, rank)
            for rank in waiting
            for channel in self._pending(rank)
            if late in self._members(channel)
        ]
        behind = [call for call in calls if self._entered(late, call.channel) < call.number]
        return min(behind or calls, key=lambda call: (call.axis == BACKGROUND, call.channel == "board"), default=None)

    def _call(self, channel: str, rank: int) -> Call:
        number = self._first_pending(rank, channel)
        name, ends = group_of(channel), channel.partition(":")[2]
        reading = self.readings[rank]
        axis = reading.groups.get(name, (f"group {name}", ()))[0]
        if ends:
            members = reading.groups.get(name, ("", ()))[1]
            sender, receiver = (members[int(place)] if members else place for place in ends.split(">"))
            return Call(channel=channel, number=number, axis=axis, operation=f"message {sender} to {receiver}")
        ticket = next((each for each in reading.tickets if (each.channel, each.number) == (channel, number)), None)
        if ticket is None:
            return Call(channel=channel, number=number, axis=axis, operation="collective")
        return _call_of(ticket, reading)


def verdict_from(plain: Mapping[str, Any]) -> Verdict:
    """The verdict of a message, which has it as `dataclasses.asdict` makes it."""
    call = None if plain["call"] is None else Call(**plain["call"])
    versions = tuple((tuple(ranks), str(version)) for ranks, version in plain["versions"])
    return Verdict(**{**plain, "call": call, "waiting": tuple(plain["waiting"]), "versions": versions})


def call_of_waiting(readings: Mapping[int, Reading], late: int) -> Call | None:
    """The call in which the other ranks lost a rank that has died: the newest one of any of them, of training if there
    is one.

    Their own counters do not show it: a collective that has failed counts as completed.
    """
    entered = [
        (_axis_of(ticket, reading) != BACKGROUND, ticket.nanoseconds, ticket.number, rank, ticket)
        for rank, reading in readings.items()
        for ticket in reading.tickets
        if rank != late and late in reading.groups.get(ticket.group, ("", ()))[1]
    ]
    if not entered:
        return None
    *_, rank, ticket = max(entered, key=lambda each: each[:4])
    return _call_of(ticket, readings[rank])


def _call_of(ticket: Ticket, reading: Reading) -> Call:
    axis, channel, number = _axis_of(ticket, reading), ticket.channel, ticket.number
    return Call(channel=channel, number=number, axis=axis, operation=ticket.operation, inputs=ticket.inputs())


def _axis_of(ticket: Ticket, reading: Reading) -> str:
    return reading.groups.get(ticket.group, (f"group {ticket.group}", ()))[0]


def find_mismatch(readings: Mapping[int, Reading], *, has_other_hosts: bool = False) -> Verdict | None:
    """The first collective under whose number ranks have made different calls. `has_other_hosts`: groups with ranks
    that are not in `readings` are left out. Most of their ranks may have made the call of the minority here."""
    by_number: dict[tuple[int, str], dict[int, Ticket]] = {}
    for rank, reading in readings.items():
        for ticket in reading.tickets:
            members = reading.groups.get(ticket.group, ("", ()))[1]
            if has_other_hosts and not (members and readings.keys() >= set(members)):
                continue
            by_number.setdefault((ticket.number, ticket.channel), {})[rank] = ticket
    for _, tickets in sorted(by_number.items()):
        calls = {rank: _comparable(ticket) for rank, ticket in tickets.items()}
        versions = _versions(calls)
        if len(versions) > 1:
            rank = versions[-1][0][0]
            usual = versions[0][0][0]
            call = _call_of(tickets[usual], readings[usual])
            waited = min(each.still for each in readings.values())
            return Verdict(kind="mismatch", rank=rank, call=call, versions=versions, waited=waited)
    return None


def _comparable(ticket: Ticket) -> str:
    """The part of a call that must be the same on all ranks."""
    has_inputs = ticket.operation in SAME_ON_ALL and ticket.inputs()
    return f"{ticket.operation} of {ticket.inputs()}" if has_inputs else ticket.operation


def _versions(calls: Mapping[int, str]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Ranks by their call, the most common call first."""
    counted = Counter(calls.values())
    order = sorted(counted, key=lambda call: (-counted[call], call))
    return tuple((tuple(sorted(rank for rank in calls if calls[rank] == call)), call) for call in order)
