"""Warn once when steps wait for bytes that travel: the link is slow for the plan.

A rank that is late lets the others wait, and waits little itself. Bytes that travel let all ranks wait. So the wait of
the rank that waits least, in each timed step, is what the link costs:

    rank 0   compute ▒▒▒▒▒▒▒▒░░░░░░      ▒ waits for rank 1: a warning about stragglers
    rank 1   compute compute ░░░░░░      ░ waits for bytes, as rank 0 does: a slow link
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from shoal.comm.profile.axis_overlap import AxisTime
from shoal.errors import Problem

FIRST = 20
"""The step after which ranks compare their waits; then after twice as many, and so on."""
WINDOW = 10
"""The last timed steps that are compared."""
WARN = 0.25
"""The part of a step from which a slow link is worth a warning. An assumption."""
BUSY = 0.1
"""The part of a step without a core from which its waits show the cores and not the link: bytes travel by threads."""
LEAST_SECONDS = 0.02
"""Of a step: a small model whose steps wait less has steps of a few milliseconds, and no slow link. An assumption."""
FIXES = {
    "dp": "--plan.compress int8 or --plan.sync diloco:50 sends less",
    "tp": "--plan.tp 1, or keep tp within a host",
    "cp": "--plan.cp 1, or keep cp within a host",
    "ep": "--plan.ep 1, or keep ep within a host",
}
"""Axis → what to type. In a pipeline stages wait for each other whatever the link is: `pp` has no warning."""


class SlowLink:
    """The waits of this rank, by axis."""

    def __init__(self) -> None:
        self._waits: dict[str, list[float]] = {}
        self._has_warned = False

    def note(self, axes: Mapping[str, AxisTime], seconds: float, *, without_core: float = 0.0) -> None:
        """Note a step: its communication by axis, empty if it was not timed; its length; and the seconds in which the
        main thread had no core."""
        for axis, each in axes.items():
            if axis.partition("_")[0] in FIXES:
                waited = 0.0 if without_core > BUSY * seconds else min(each.exposed, seconds)
                self._waits[axis] = [*self._waits.get(axis, ()), waited, seconds][-2 * WINDOW :]

    def is_due(self, step: int) -> bool:
        """Whether ranks compare their waits after this step. All ranks find the same: exchanges are rare.

        >>> [step for step in range(1, 400) if SlowLink().is_due(step)]
        [20, 40, 80, 160, 320]
        """
        times, rest = divmod(step, FIRST)
        return not rest and times > 0 and times & (times - 1) == 0

    def own(self) -> dict[str, list[float]]:
        """Axis → waits and lengths of the last timed steps of this rank, in turns."""
        return self._waits

    def warning(self, ranks: Sequence[Mapping[str, Sequence[float]]]) -> Problem | None:
        """A warning, once, from what `own` is on every rank."""
        costs = {axis: _cost(axis, ranks) for axis in self._waits}
        axis = max(costs, key=lambda each: costs[each][0], default="")
        if self._has_warned or not axis:
            return None
        waited, seconds = costs[axis]
        if waited < max(LEAST_SECONDS, WARN * seconds):
            return None
        self._has_warned = True
        share = f"{waited / seconds:.0%} of their time ({waited * 1e3:,.0f} of {seconds * 1e3:,.0f} ms)"
        what = f"steps wait {share} for messages of {axis}, on every rank: the link is slow for this plan"
        fix = f"{FIXES[axis.partition('_')[0]]}; shoal doctor --hosts A,B measures links, shoal profile the parts"
        return Problem("T101", what, fix)


def _cost(axis: str, ranks: Sequence[Mapping[str, Sequence[float]]]) -> tuple[float, float]:
    """The wait of the rank that waits least, and the length of a step; medians. Nothing, if a rank has not measured."""
    every = [ranks_waits.get(axis, ()) for ranks_waits in ranks]
    number = min(map(len, every)) // 2 * 2
    if number < 4:  # the first step connects, and allocates
        return 0.0, 1.0
    newest = [list(each[-number:]) for each in every]
    least = [min(step) for step in zip(*(each[::2] for each in newest), strict=True)]
    longest = [max(step) for step in zip(*(each[1::2] for each in newest), strict=True)]
    return statistics.median(least), statistics.median(longest)
