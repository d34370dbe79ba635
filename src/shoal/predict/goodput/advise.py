"""What would make a run lose less of its time: each change by itself, and what it brings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.predict.goodput.recovery import Recovery
from shoal.predict.goodput.simulate import Goodput, simulate

LEAST_GAIN = 0.002
"""What a change must bring to be worth a line."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a run or of a cluster, and the prediction with it."""

    what: str
    goodput: Goodput


def changes(recovery: Recovery, now: Goodput) -> list[Change]:
    """Changes that bring something, the best first."""
    tried = [Change(what, simulate(other)) for what, other in _ideas(recovery)]
    useful = [one for one in tried if one.goodput.ettr >= now.ettr + LEAST_GAIN]
    return sorted(useful, key=lambda one: -one.goodput.ettr)


def _ideas(recovery: Recovery) -> Iterator[tuple[str, Recovery]]:
    if not recovery.has_memory_tier:
        what = "checkpoint.memory_every: the last copy stays in host memory"
        what += ", and with --hosts in that of another host" if recovery.hosts > 1 else ""
        yield what, replace(recovery, has_memory_tier=True)
    if not recovery.spares:
        num_away = recovery.repair / recovery.between_faults * recovery.lost_hosts
        more = max(1, round(num_away))
        yield f"{more} spare host{'s' * (more > 1)}", replace(recovery, spares=more)
    yield "restarts in half of the time", replace(recovery, restart=recovery.restart / 2)
