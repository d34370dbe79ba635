"""Simulate a schedule: its duration, where its ranks wait, and how many activations each of them stores.

The textbook's bubble, (p − 1)(F + B), holds for equal stages and free sends. A real model has an embedding on its first
stage, a head on its last and a link between them. So the table itself is simulated: every rank runs its own order, and
each action starts when the rank is free [1] and its inputs have arrived [2].

    rank 0   │ F0 │ F1 │ · · · · · · · │   B0   │         · free [1], but its input has not arrived [2]: the bubble
    rank 1     · · ↘ · · │ F0 │   B0   │↗                  ↘ ↗ a send [3]

[1] Ranks have no common clock: one is `free` when its last action ends, whatever the others do.
[2] The latest input decides. Actions are visited tick by tick, so that an input is always known before it is needed.
[3] A result is sent while the next action computes: it costs the receiver time, and the sender none.

All numbers are predicted. The caller gives the costs of the stages.
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
                raise ShoalError(
                    f"{name} must be a number of seconds of at least 0, got {seconds}", fix=f"{name}=0", code="P054"
                )

    def seconds(self, kind: Kind) -> float:
        """Seconds of one action."""
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
    """The start and end of a slot, in seconds since the step began."""

    slot: Action | Pair
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation."""

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
        """Seconds that the busiest rank waited: the cost of the schedule beyond the work itself."""
        return self.total - max(self.busy)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds that each rank waited between its first and its last action.

        Waiting outside of that is lost only because all ranks begin and end a step together.
        """
        active = [rank[-1].end - rank[0].start if rank else 0.0 for rank in self.spans]
        return tuple(max(0.0, whole - busy) for whole, busy in zip(active, self.busy, strict=True))


def simulate(
    table: ScheduleTable, cost: StageCost | Sequence[StageCost], *, send: float = 0.0, overlap: float = 0.0
) -> Timeline:
    """Simulate a schedule. `cost` is one for all stages, or one per stage.

    `send` is the time of a result to another rank; sending does not block computation. `overlap` is the fraction of the
    shorter half of an overlapped pair that is hidden behind the longer. 0: one after the other, as torch runs them on
    one device. 1: the pair takes as long as its longer half.

    >>> from shoal.blueprint.schedules.schedule_orders import make_schedule
    >>> table = make_schedule("1f1b", num_ranks=4, v=1, num_microbatches=8)
    >>> timeline = simulate(table, StageCost(forward=1, input_grad=1, weight_grad=1))
    >>> timeline.total, timeline.bubble_seconds, round(timeline.bubble, 3)
    (33.0, 9.0, 0.273)
    """
    costs = _per_stage(cost, table.num_stages)
    if not (0 <= send < math.inf and 0 <= overlap <= 1):
        what = f"send must be at least 0 and overlap from 0 to 1, got send={send} and overlap={overlap}"
        raise ShoalError(what, fix="send=0, overlap=0", code="P054")
    arrived: dict[Action, tuple[float, int]] = {}  # a result → its time and its rank
    free = [0.0] * table.num_ranks
    spans: list[list[Span]] = [[] for _ in free]
    for _, rank, slot in table.ticks():
        start = free[rank]  # [1]
        for need in (need for part in slot.parts for need in part.needs(table.num_stages)):
            if need not in arrived:
                table.validate()  # raises
            seconds, source = arrived[need]
            start = max(start, seconds if source == rank else seconds + send)  # [2], [3]
        end = free[rank] = start + _seconds(slot, costs, overlap)
        spans[rank].append(Span(slot, start, end))
        arrived.update((result, (end, rank)) for part in slot.parts for result in part.results)
    return Timeline(table, costs, tuple(map(tuple, spans)))


def in_flight(table: ScheduleTable, weights: Sequence[float] | None = None) -> tuple[float, ...]:
    """Per rank, the largest number of stored activations, in microbatches of one stage.

    Activations are stored from the forward until the whole backward, or its weight-gradient part, is done. `weights`
    is the size of a microbatch on each stage, in bytes or layers. The order alone decides the result, not the clock.

    >>> from shoal.blueprint.schedules.schedule_orders import make_schedule
    >>> in_flight(make_schedule("1f1b", num_ranks=4, v=1, num_microbatches=8))
    (4.0, 3.0, 2.0, 1.0)
    """
    if weights is not None and len(weights) != table.num_stages:
        what = f"weights must have one entry for each of {table.num_stages} stages, got {len(weights)}"
        raise ShoalError(what, fix="one weight per stage", code="P054")
    most = []
    for rank in range(table.num_ranks):
        stored = peak = 0.0
        for part in (part for slot in table.order(rank) for part in slot.parts):
            weight = float(weights[part.stage]) if weights is not None else 1.0
            stored += weight * {Kind.F: 1, Kind.I: 0, Kind.W: -1, Kind.B: -1}[part.kind]
            peak = max(peak, stored)
        most.append(peak)
    return tuple(most)


def _per_stage(cost: StageCost | Sequence[StageCost], num_stages: int) -> tuple[StageCost, ...]:
    costs = (cost,) * num_stages if isinstance(cost, StageCost) else tuple(cost)
    if len(costs) != num_stages:
        what = f"cost must be one for all stages or one for each of {num_stages}, got {len(costs)}"
        raise ShoalError(what, fix="one cost per stage, or one for all", code="P054")
    return costs


def _seconds(slot: Action | Pair, costs: Sequence[StageCost], overlap: float) -> float:
    """Seconds of a slot. As in torch, a pair starts when both halves can, and sends only when both are done."""
    lengths = [costs[part.stage].seconds(part.kind) for part in slot.parts]
    return sum(lengths) - (overlap * min(lengths) if len(lengths) > 1 else 0.0)
