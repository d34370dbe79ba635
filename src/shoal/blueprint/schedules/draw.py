"""A played schedule as text: a line per rank, time to the right, a box as long as its action, dots where a rank waits.

A box begins with the number of its microbatch, and its filling says what it is. With several stages per rank, the
stages take turns between two fillings, so that one sees where a microbatch passes for the second time. Where there is
a single column for a forward, the second passing is in letters: a is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shoal.blueprint.schedules.simulate import Timeline
from shoal.blueprint.schedules.table import Action, Kind

FILLING = {Kind.F: " '", Kind.B: "━═", Kind.I: "─╌", Kind.W: "░▒"}
NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}
IDLE = "."


def draw(timeline: Timeline, width: int = 100) -> str:
    """At most `width` columns, if every action can have one of its own.

    >>> from shoal.blueprint.schedules.generate import make_schedule
    >>> from shoal.blueprint.schedules.simulate import StageCost, simulate
    >>> table = make_schedule("1f1b", num_ranks=2, v=1, num_microbatches=3)
    >>> print(draw(simulate(table, StageCost(forward=1, input_grad=1, weight_grad=1)), width=44))
    rank 0 │0  1  ......0━━━━━2  1━━━━━...2━━━━━
    rank 1 │...0  0━━━━━1  1━━━━━2  2━━━━━......
            0   forward   0━━ backward   . idle
    """
    labels = [f"rank {rank} │" for rank in range(timeline.table.num_ranks)]
    margin = max(map(len, labels))
    scale = _columns_per_second(timeline, width - margin)
    lines = [
        label.rjust(margin) + "".join(_boxes(timeline, rank, scale)).ljust(round(timeline.total * scale), IDLE)
        for rank, label in enumerate(labels)
    ]
    return "\n".join([*lines, " " * margin + _legend(timeline, scale)])


def _columns_per_second(timeline: Timeline, columns: int) -> float:
    """The largest scale that fits; where possible one that gives the shortest action a whole number of columns."""
    lengths = [end - start for rank in timeline.spans for _, start, end in rank if end > start]
    if not lengths:
        return 1.0
    whole = math.floor(columns * min(lengths) / timeline.total + 1e-9)
    return whole / min(lengths) if whole >= 1 else columns / timeline.total


def _boxes(timeline: Timeline, rank: int, scale: float) -> Iterator[str]:
    column = 0
    for slot, start, end in timeline.spans[rank]:
        yield IDLE * (round(start * scale) - column)
        column = max(column, round(start * scale))
        lengths = [timeline.costs[part.stage].seconds(part.kind) for part in slot.parts]
        for number, part in enumerate(slot.parts):  # the halves of a pair share its box in proportion
            share = sum(lengths[: number + 1]) / (sum(lengths) or 1)
            stop = round((start + (end - start) * share) * scale)
            yield _box(part, stop - column, timeline.table.num_ranks)
            column = max(column, stop)


def _box(action: Action, width: int, num_ranks: int) -> str:
    """A number that has no room is shown by its last digits. In a single column only forwards have theirs."""
    turn = action.stage // num_ranks % 2
    if width == 1 and action.kind is Kind.F:
        return ("0123456789", "abcdefghij")[turn][action.microbatch % 10]
    if width == 1:
        return FILLING[action.kind][turn]
    return str(action.microbatch)[-width:].ljust(width, FILLING[action.kind][turn]) if width > 0 else ""


def _legend(timeline: Timeline, scale: float) -> str:
    """A box of microbatch 0 for every kind that there is, and for both turns of it."""
    table = timeline.table
    boxes: dict[Kind, dict[int, str]] = {}
    for part in (part for _, _, slot in table.ticks() for part in slot.parts):
        width = min(3, max(1, round(timeline.costs[part.stage].seconds(part.kind) * scale)))
        boxes.setdefault(part.kind, {}).setdefault(
            part.stage // table.num_ranks % 2, _box(part._replace(microbatch=0), width, table.num_ranks)
        )
    words = [
        f"{' or '.join(boxes[kind][turn] for turn in sorted(boxes[kind]))} {NAMES[kind]}"
        for kind in Kind
        if kind in boxes
    ]
    return "   ".join([*words, f"{IDLE} idle"])
