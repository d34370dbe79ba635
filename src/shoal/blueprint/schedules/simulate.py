"""How long a schedule takes, where its ranks wait, and how much each of them has to keep: the same table, with seconds.

The textbook's bubble, (p − 1)(F + B), holds for equal stages and free sends. A real model has an embedding on its first
stage, a head on its last and a link between them. So the table itself is played: every rank runs its own order, and
each action starts when the rank is free and what the action needs has arrived.

Everything here is predicted. What a stage costs comes from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.blueprint.schedules.table import Action, Kind, Pair, ScheduleTable
from shoal.errors import ShoalError


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCost:
    """Seconds that one microbatch takes on one stage. A whole backward takes `input_grad` + `weight_grad`."""

    forward: float
    input_grad: float
    weight_grad: float

    def __post_init__(self) -> None:
        for name in ("forward", "input_grad", "weight_grad"):
            if not 0 <= (seconds := getattr(self, name)) < math.inf:
                raise ShoalError(f"{name}={seconds} is not a number of seconds", fix=f"{name}=0 or more")

    def seconds(self, kind: Kind) -> float:
        """Of one action."""
        match kind:
            case Kind.F:
                return self.forward
            case Kind.I:
                return self.input_grad
            case Kind.W:
                return self.weight_grad
            case Kind.B:
                return self.input_grad + self.weight_grad


class Span(NamedTuple):
    """When something ran, in seconds since the step began."""

    slot: Action | Pair
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule that has been played."""

    table: ScheduleTable
    costs: tuple[StageCost, ...]
    """Per stage."""
    spans: tuple[tuple[Span, ...], ...]
    """Per rank, in the order in which it ran them."""

    @property
    def total(self) -> float:
        """Seconds until the last rank is done."""
        return max((span.end for rank in self.spans for span in rank), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computed."""
        return tuple(math.fsum(span.end - span.start for span in rank) for rank in self.spans)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they waited."""
        whole = self.total * self.table.num_ranks
        return max(0.0, 1 - math.fsum(self.busy) / whole) if whole else 0.0

    @property
    def bubble_seconds(self) -> float:
        """How long the rank that has most to do waited: what the schedule costs beyond the work itself."""
        return self.total - max(self.busy)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds that each rank waited after it had begun and before it was done.

        What a rank waits outside of that is lost only because all ranks begin and end a step together.
        """
        lived = [rank[-1].end - rank[0].start if rank else 0.0 for rank in self.spans]
        return tuple(max(0.0, whole - busy) for whole, busy in zip(lived, self.busy, strict=True))


def simulate(
    table: ScheduleTable, cost: StageCost | Sequence[StageCost], *, send: float = 0.0, overlap: float = 0.0
) -> Timeline:
    """Play a schedule. `cost` is one for all stages, or one per stage.

    `send` is how long a result takes to another rank; sending keeps nobody from computing. `overlap` is the part of the
    shorter half of an overlapped pair that hides behind the longer: 0, one after the other, as torch runs them on one
    device; 1, the pair takes as long as its longer half.

    >>> from shoal.blueprint.schedules.generate import make_schedule
    >>> table = make_schedule("1f1b", num_ranks=4, v=1, num_microbatches=8)
    >>> timeline = simulate(table, StageCost(forward=1, input_grad=1, weight_grad=1))
    >>> timeline.total, timeline.bubble_seconds, round(timeline.bubble, 3)
    (33.0, 9.0, 0.273)
    """
    costs = _per_stage(cost, table.num_stages)
    if not (0 <= send < math.inf and 0 <= overlap <= 1):
        raise ShoalError(f"send={send}, overlap={overlap} cannot be", fix="send=0 or more seconds, overlap=0 to 1")
    arrived: dict[Action, tuple[float, int]] = {}  # a result → when it was there, and on which rank
    free = [0.0] * table.num_ranks
    spans: list[list[Span]] = [[] for _ in free]
    for _, rank, slot in table.ticks():
        start = free[rank]
        for need in (need for part in slot.parts for need in part.needs(table.num_stages)):
            if need not in arrived:
                table.validate()  # says what is wrong with the table
            seconds, source = arrived[need]
            start = max(start, seconds if source == rank else seconds + send)
        end = free[rank] = start + _seconds(slot, costs, overlap)
        spans[rank].append(Span(slot, start, end))
        arrived.update((result, (end, rank)) for part in slot.parts for result in part.results)
    return Timeline(table, costs, tuple(map(tuple, spans)))


def in_flight(table: ScheduleTable, weights: Sequence[float] | None = None) -> tuple[float, ...]:
    """Per rank, the most that it ever keeps for backwards still to come, in microbatches of one stage.

    A forward keeps its activations until the whole backward, or the weight-gradient part of it, is done. `weights` says
    how much a microbatch keeps on each stage: bytes, or layers. It is decided by the order alone, not by the clock.

    >>> from shoal.blueprint.schedules.generate import make_schedule
    >>> in_flight(make_schedule("1f1b", num_ranks=4, v=1, num_microbatches=8))
    (4.0, 3.0, 2.0, 1.0)
    """
    if weights is not None and len(weights) != table.num_stages:
        raise ShoalError(f"{len(weights)} weights for {table.num_stages} stages", fix="one weight per stage")
    most = []
    for rank in range(table.num_ranks):
        kept = peak = 0.0
        for part in (part for slot in table.order(rank) for part in slot.parts):
            weight = float(weights[part.stage]) if weights is not None else 1.0
            kept += weight * {Kind.F: 1, Kind.I: 0, Kind.W: -1, Kind.B: -1}[part.kind]
            peak = max(peak, kept)
        most.append(peak)
    return tuple(most)


def _per_stage(cost: StageCost | Sequence[StageCost], num_stages: int) -> tuple[StageCost, ...]:
    costs = (cost,) * num_stages if isinstance(cost, StageCost) else tuple(cost)
    if len(costs) != num_stages:
        raise ShoalError(f"{len(costs)} costs for {num_stages} stages", fix="one cost per stage, or one for all")
    return costs


def _seconds(slot: Action | Pair, costs: Sequence[StageCost], overlap: float) -> float:
    """A pair starts when both of its halves can and sends nothing before both are done: so torch runs it."""
    lengths = [costs[part.stage].seconds(part.kind) for part in slot.parts]
    return sum(lengths) - (overlap * min(lengths) if len(lengths) > 1 else 0.0)
