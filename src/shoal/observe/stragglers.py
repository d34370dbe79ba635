"""Report the rank that holds up the others: a metric, a warning, and the summary.

`shoal.comm.heartbeat.arrivals` measures it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shoal.comm.heartbeat.arrivals import WARN, Straggler
from shoal.comm.heartbeat.heart import heart
from shoal.comm.world import World
from shoal.errors import Problem


class Stragglers:
    """The straggler as rank 0 of a launch measures it; no rank else, and no rank under another launcher."""

    def __init__(self) -> None:
        self._reported = 0
        self._has_warned = False

    def newly_found(self) -> Straggler | None:
        """The straggler, if it was measured again since the last call."""
        found = self._found()
        if found is None or found.collectives == self._reported:
            return None
        self._reported = found.collectives
        return found

    def warning(self, num_ranks: int) -> Problem | None:
        """A warning, once, when one rank costs more than a tenth of the time."""
        found = self._found()
        if found is None or self._has_warned:
            return None
        if found.cost_fraction < WARN or not found.stands_out:
            return None
        self._has_warned = True
        share, late = f"{found.last_fraction:.0%}", f"{found.late_seconds * 1e3:.1f} ms"
        what = f"rank {found.rank} of {num_ranks} was last in {share} of collectives, by {late} (median)"
        what = f"{what}, which costs {found.cost_fraction:.0%} of the time"
        return Problem(
            "T060", what, "top -H on its host, and nvidia-smi -q -d CLOCK: other processes, heat, a slow disk"
        )

    def summary(self, world: World) -> dict[str, Any] | None:
        """The straggler for the summary, the same on every rank; None: none was measured."""
        found = self._found()
        return world.all_gather_object(None if found is None else asdict(found))[0]

    def _found(self) -> Straggler | None:
        beating = heart()
        return None if beating is None or beating.index else beating.straggler()
