"""How much of the communication of each axis is hidden behind computation, in every run.

Some steps are timed as those of a profile are, on a CPU: the first one, and every tenth. Of each collective is known
when this rank has started it, when it was over, and how long the main thread has waited for it:

    main thread    compute  ●──── compute ────┆▒▒▒▒▒ compute     ● started   ▒ waited for: exposed
    in flight               ├───────────────────────┤            the rest of its time is hidden

torch does not say when a message between two ranks has arrived. It counts until it was waited for, so that the hidden
part of pipelines and ring attention is an upper bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.comm.profile.intervals import Interval, length
from shoal.comm.profile.timer import PartTimer, Step, current
from shoal.comm.profile.waits import OTHER_GROUP, WORLD, watch_waits

TIMED_EVERY = 10
"""Steps; as `parallel.data.ddp` times the gradients of replicas."""


@dataclass(frozen=True, slots=True)
class AxisTime:
    """The communication of one axis in one step, or the mean of several, on one rank."""

    seconds: float
    """Time in which at least one collective or message was in flight."""
    exposed: float
    """The part of it in which the main thread has waited."""

    @property
    def hidden(self) -> float:
        """The hidden fraction, from 0 to 1."""
        return max(0.0, 1.0 - self.exposed / self.seconds) if self.seconds else 1.0


def by_axis(steps: list[Step], entered: Mapping[str, int], ended: Mapping[str, int]) -> dict[str, AxisTime]:
    """Axis → its communication in a step, the mean over steps. Exchanges of all ranks, as of losses, are no axis."""
    flights: dict[str, list[Interval]] = defaultdict(list)
    waits: dict[str, list[Interval]] = defaultdict(list)
    for span in (span for step in steps for span in step.spans if span.is_wait):
        if span.name in (WORLD, OTHER_GROUP):
            continue
        waits[span.name].append((span.begin, span.end))
        key = span.key or ""
        until = min(ended.get(key, span.end), span.end)
        flights[span.name].append((min(entered.get(key, span.begin), span.begin), until))
    return {
        axis: AxisTime(
            length([*flights[axis], *waits[axis]]) / 1e9 / len(steps), length(waits[axis]) / 1e9 / len(steps)
        )
        for axis in waits
    }


class AxisOverlap:
    """Times the communication of some steps of a run."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.last: dict[str, AxisTime] | None = None
        """Of the last step; None: it was not timed."""
        self.without_core = 0.0
        """Seconds of the last timed step in which the main thread could run and had no core, by the kernel's count."""

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Make a step inside of it; steps count from 0."""
        self.last = None
        if not (self.is_on and (index == 0 or (index + 1) % TIMED_EVERY == 0)):
            yield
            return
        timer = current.timer = PartTimer(is_sample=True)
        restore = watch_waits()
        timer.begin_step()
        try:
            yield
            timer.end_step()
            self.last = by_axis(timer.steps, timer.entered, timer.ended)
            self.without_core = sum(step.delay or 0 for step in timer.steps) / 1e9
        finally:
            restore()
            current.timer = None
