"""A run of a month on a cluster that fails, event by event.

    train ── fault ── detection, restart ── train ── fault ── detection ── fault ── detection, restart ── train ...

A fault also comes while a run recovers from another: then the recovery begins again. Faults of devices are independent,
with a constant rate. A run on fewer hosts is as much slower as they are fewer.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from shoal.predict.goodput.recovery import Recovery

MONTH = 30 * 86400.0
ENOUGH_FAULTS = 2000
"""Faults of a simulation of which chance decides little: the ratio of two seeds differs by a few thousandths."""
CAUSES = ("recovery", "computed again", "checkpoints", "fewer hosts")


@dataclass(slots=True)
class Goodput:
    """Where the time of a run went, in seconds."""

    wall: float = 0.0
    useful: float = 0.0
    """Steps that count, at the speed of all hosts."""
    num_faults: int = 0
    lost: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    """Cause → seconds that are not useful; with these, `useful` adds up to `wall`."""

    @property
    def ettr(self) -> float:
        """Effective training time ratio: the part of the time that is useful."""
        return self.useful / self.wall

    def parts(self) -> dict[str, float]:
        """Cause → its part of the time."""
        return {cause: seconds / self.wall for cause, seconds in self.lost.items()}


def simulate(recovery: Recovery, *, seed: int = 0, duration: float | None = None) -> Goodput:
    """Simulate a run of a month, or longer where faults are rare; the same seed gives the same faults."""
    end = duration or max(MONTH, ENOUGH_FAULTS * recovery.between_faults)
    cluster = _Cluster(recovery, random.Random(seed))
    while cluster.clock < end:
        cluster.next_event(end)
    cluster.total.wall = cluster.clock
    return cluster.total


class _Cluster:
    """The state between two events."""

    def __init__(self, recovery: Recovery, rng: random.Random) -> None:
        self.of, self.rng, self.total = recovery, rng, Goodput()
        self.clock = 0.0
        self.active, self.spares = recovery.hosts, recovery.spares
        self.repairs: list[float] = []
        """When lost hosts come back."""
        self.pause = 0.0
        """Seconds until training continues; 0: it trains."""
        self.trained = 0.0
        """Seconds of training since the last restart."""

    @property
    def speed(self) -> float:
        return self.active / self.of.hosts

    def next_event(self, end: float) -> None:
        """Go to the next fault, the return of a host, or the end of a recovery."""
        rate = self.active * self.of.per_host / self.of.mtbf
        fault = self.clock + self.rng.expovariate(rate) if rate else float("inf")
        repaired = self.repairs[0] if self.repairs else float("inf")
        recovered = self.clock + self.pause if self.pause and self.active else float("inf")
        now = min(fault, repaired, recovered, end)
        self._spend(now - self.clock)
        self.clock = now
        if now == fault:
            self._fail()
        elif now == repaired:
            self._return()
        elif now == recovered:
            self.pause = 0.0

    def _spend(self, seconds: float) -> None:
        if self.pause or not self.active:
            self.total.lost["recovery" if self.active else "fewer hosts"] += seconds
            self.pause -= seconds if self.active else 0.0
            return
        training = seconds * self.of.interval / (self.of.interval + self.of.stall)
        self.trained += training
        self.total.lost["checkpoints"] += seconds - training
        self.total.lost["fewer hosts"] += training * (1 - self.speed)
        self.total.useful += training * self.speed

    def _fail(self) -> None:
        self.total.num_faults += 1
        is_host = self.rng.random() < self.of.lost_hosts
        is_kept = self.of.has_memory_tier and (self.of.hosts > 1 or not is_host)
        again = self._unsaved(is_kept)
        self.total.useful -= again * self.speed
        self.total.lost["fewer hosts"] -= again * (1 - self.speed)
        self.total.lost["computed again"] += again
        self.trained = 0.0
        self.pause = self.of.detection + self.of.restart + (0.0 if is_kept else self.of.read)
        if is_host:
            heapq.heappush(self.repairs, self.clock + self.of.repair)
            self.active, self.spares = (self.active, self.spares - 1) if self.spares else (self.active - 1, 0)

    def _unsaved(self, is_kept: bool) -> float:
        """Seconds of training since the last copy, or since the last one that is on the disk."""
        since_copy = self.trained % self.of.interval
        if is_kept or since_copy >= self.of.write:
            return since_copy
        return min(since_copy + self.of.interval, self.trained)

    def _return(self) -> None:
        """A host is back: it joins the others, or becomes a spare."""
        heapq.heappop(self.repairs)
        if self.active < self.of.hosts:
            self.active += 1
            self.pause = self.of.restart
            self.trained = 0.0  # a restart on purpose saves before it
        else:
            self.spares += 1
