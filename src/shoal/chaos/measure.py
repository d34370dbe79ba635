"""What the faults of a drill have cost: the time to name each, to recover from it, and the ratio of useful time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.chaos.journal import Journal, Made
from shoal.chaos.kinds import KINDS, names_it
from shoal.predict.goodput.recovery import Recovery
from shoal.predict.goodput.simulate import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one fault."""

    made: Made
    named: float | None
    """Seconds until it was named, with the right rank or host; None: it was not."""
    recovered: float | None
    """Seconds until a step that had not been made before; None: never."""
    has_to_be_named: bool

    @property
    def is_right(self) -> bool:
        """Whether it was named, if it has to be."""
        return self.named is not None or not self.has_to_be_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The time of a run."""

    wall: float
    """Seconds from the first step to the last."""
    step: float
    """Seconds of a step while no fault was active: measured."""
    ettr: float
    """Effective training time ratio: the time of all steps at that speed, divided by `wall`."""
    predicted: float
    """The ratio that the simulator predicts from the measured pauses and the rate of restarts."""
    pauses: float
    """Seconds without a step, of all faults together."""
    again: int
    """Steps that were made again."""


def outcomes(journal: Journal, *, ranks: int) -> list[Outcome]:
    """The outcome of each fault that was made."""
    found: list[Outcome] = []
    for together in _groups(journal.made):
        end = next((each.at for each in journal.made if each.at > together[-1].at), float("inf"))
        named = [_named(journal, made, end, ranks) for made in together]
        for made, at in zip(together, named, strict=True):
            recovered = journal.recovered(made)
            found.append(
                Outcome(
                    made=made,
                    named=None if at is None else at - made.at,
                    recovered=None if recovered is None else recovered - made.at,
                    has_to_be_named=_has_to_be_named(made, together, named),
                )
            )
    return found


def _groups(made: list[Made]) -> Iterator[list[Made]]:
    """Faults with those that followed them at once."""
    starts = [number for number, each in enumerate(made) if not each.injection.is_double or not number]
    for first, last in itertools.pairwise([*starts, len(made)]):
        yield made[first:last]


def _has_to_be_named(made: Made, together: list[Made], named: list[float | None]) -> bool:
    """Whether a line has to name a fault. Of several at once, one may end the ranks before another is noticed; and a
    command that is killed says nothing."""
    if not KINDS[made.injection.kind].report:
        return False
    if len(together) == 1:
        return True
    return made is together[0] and not any(named) and all(each.injection.kind != "supervisor" for each in together)


def _named(journal: Journal, made: Made, end: float, ranks: int) -> float | None:
    """When a line named the fault, before a later one."""
    rank, host = made.injection.rank, made.host
    for line in journal.lines:
        if made.at <= line.at < end and names_it(made.injection.kind, line.text, rank=rank, ranks=ranks, host=host):
            return line.at
    return None


def goodput(journal: Journal) -> Goodput | None:
    """The ratio of useful time; None: too few steps were made."""
    steps = journal.steps
    if len(steps) < 3:
        return None
    wall = steps[-1].at - steps[0].at
    gaps = [(old.at, new.at) for old, new in itertools.pairwise(steps)]
    active = [(made.at, journal.recovered(made) or steps[-1].at) for made in journal.made]
    clean = [end - begin for begin, end in gaps if not any(begin < last and first < end for first, last in active)]
    usual = statistics.fmean(clean) if clean else statistics.median(end - begin for begin, end in gaps)
    num_restarts = sum(old.worker != new.worker for old, new in itertools.pairwise(steps))
    num_useful = max(each.step for each in steps) - steps[0].step
    again = len(gaps) - num_useful
    pauses = max(0.0, wall - len(gaps) * usual)
    return Goodput(
        wall=wall,
        step=usual,
        ettr=num_useful * usual / wall,
        predicted=_predicted(wall, num_restarts, pauses / max(1, num_restarts), _interval(journal)),
        pauses=pauses,
        again=again,
    )


def _interval(journal: Journal) -> float:
    """Seconds between two checkpoints: the median."""
    times = [each.at for each in journal.commits]
    return statistics.median(new - old for old, new in itertools.pairwise(times)) if len(times) > 2 else 0.0


def _predicted(wall: float, restarts: int, pause: float, interval: float) -> float:
    """The prediction of `predict.goodput` for a run with this number of restarts, pause and interval of checkpoints."""
    if not restarts:
        return 1.0
    recovery = Recovery(
        hosts=1,
        per_host=1,
        mtbf=wall / restarts,
        stall=0.0,  # saves are part of the steps that were measured
        write=0.0,
        read=0.0,
        interval=max(interval, 1e-6),
        restart=pause,
        lost_hosts=0.0,
        detection=0.0,
    )
    return simulate(recovery, duration=2000 * recovery.between_faults).ettr
