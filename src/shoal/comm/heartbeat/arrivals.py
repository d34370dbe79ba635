"""Find the rank that is usually the last to arrive at collectives, and what that costs.

Every few seconds all ranks of a machine write, at the same time, when they entered their last collectives. In a
collective that all ranks of its group have written, the last rank held up the others from the arrival of the last but
one:

    rank 0   ────────●╌╌╌╌╌╌╌╌╌╌╌╌╌●
    rank 1   ───────●╌╌╌╌╌╌╌╌╌╌╌╌╌╌●
    rank 2   ──────────────────────●        last, 14 ms after rank 0

Several collectives of one step may be late by the same delay. So the cost of a step is its longest delay, not the sum.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.comm.heartbeat.ticket import Ticket

Sample = Mapping[tuple[str, int], int]
"""Channel and number of a collective → when a rank entered it, in ns."""
WARN = 0.1
"""Cost, as a fraction of the time, from which a straggler is worth a warning."""
FEWEST = 60
"""Sampled collectives from which a rank is named. A few of neighbouring steps may all fall into one busy moment."""
NOTICEABLE = 1e-4
"""Seconds below which an order of arrival is chance."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that costs the others most."""

    rank: int
    last_fraction: float
    """Of the sampled collectives, those in which it was last by more than 0.1 ms."""
    late_seconds: float
    """Median delay of those."""
    cost_fraction: float
    """The part of the time in which the others waited for it alone; at least this."""
    collectives: int
    """Sampled collectives."""
    stands_out: bool
    """Whether it costs more than twice as much as any other rank. Else the ranks are late in turns."""


@dataclass(slots=True)
class Arrivals:
    """Delays of all samples so far."""

    delays: dict[int, list[float]] = field(default_factory=dict)
    """Rank → by how much it was the last one, in seconds."""
    costs: dict[int, float] = field(default_factory=dict)
    """Rank → seconds for which the others waited for it."""
    seconds: float = 0.0
    """Time that the samples span."""
    collectives: int = 0

    def add(self, samples: Mapping[int, Sample], *, step_seconds: float) -> None:
        """Add one sample of each rank."""
        longest: dict[tuple[int, int], float] = {}
        times: list[int] = []
        for arrived in _complete(samples):
            (before, _), (last, rank) = sorted((time, rank) for rank, time in arrived.items())[-2:]
            delay = (last - before) / 1e9
            times.append(last)
            self.collectives += 1
            if delay > NOTICEABLE:
                self.delays.setdefault(rank, []).append(delay)
                key = rank, int(last / 1e9 / max(step_seconds, 1e-3))
                longest[key] = max(longest.get(key, 0.0), delay)
        if times:
            self.seconds += max((max(times) - min(times)) / 1e9, step_seconds)
        for (rank, _), delay in longest.items():
            self.costs[rank] = self.costs.get(rank, 0.0) + delay

    def straggler(self) -> Straggler | None:
        """The rank that costs most; None: there were too few samples, or all arrive together."""
        if self.collectives < FEWEST or not self.costs or not self.seconds:
            return None
        (cost, rank), *others = sorted(((cost, rank) for rank, cost in self.costs.items()), reverse=True)
        delays = self.delays[rank]
        return Straggler(
            rank=rank,
            last_fraction=len(delays) / self.collectives,
            late_seconds=statistics.median(delays),
            cost_fraction=min(1.0, cost / self.seconds),
            collectives=self.collectives,
            stands_out=not others or cost > 2 * others[0][0],
        )


def _complete(samples: Mapping[int, Sample]) -> Iterable[dict[int, int]]:
    """The arrivals at collectives that all ranks of their group have in their sample."""
    members: dict[str, set[int]] = {}
    arrived: dict[tuple[str, int], dict[int, int]] = {}
    for rank, sample in samples.items():
        for (group, number), time in sample.items():
            members.setdefault(group, set()).add(rank)
            arrived.setdefault((group, number), {})[rank] = time
    return [ranks for (group, _), ranks in sorted(arrived.items()) if len(ranks) == len(members[group]) > 1]


def sample_of(tickets: Iterable[Ticket]) -> list[tuple[str, int, int]]:
    """What a rank writes for the others."""
    return [(each.channel, each.number, each.nanoseconds) for each in tickets]
