"""Measure several cases in turns: round after round, so that a disturbance of the machine affects all of them.

Every turn of a case starts its own ranks, so memory is that of the case alone. The order is reversed in every second
round. The slowest rank counts in each step, and the first steps of a turn are left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.bench.training.time_steps import RankSteps, time_steps
from shoal.errors import ShoalError
from shoal.launch.local import launch
from shoal.predict.exact.state_memory import Memory
from shoal.train.recipe.preflight import Job

WARMUP_STEPS = 3
"""Steps at the start of a turn that are not timed: memory is allocated, kernels are chosen, states are created."""
Measure = Callable[[Job, int], Sequence[RankSteps]]
"""Make this many steps of a job; the steps of every rank."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some measurements, and their range."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, low=1.0, high=3.0)
        """
        known = list(values)
        return cls(statistics.median(known), min(known), max(known))

    def to_mapping(self) -> dict[str, float]:
        """As JSON."""
        return {"median": self.median, "low": self.low, "high": self.high}


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of a case."""

    seconds: tuple[float, ...]
    """Of each timed step, on its slowest rank."""
    losses: tuple[float, ...]
    """Of all steps."""
    norms: tuple[float, ...]
    """Of the gradients of all steps, before clipping."""
    peak: int
    """Bytes on the fullest rank."""
    process: int
    """Bytes of that rank before its model was built."""
    states: Memory
    """Bytes of its states."""
    wait_fraction: float
    """Time that ranks waited for batches, over the time of the steps. It is not part of the seconds."""

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @classmethod
    def of(cls, ranks: Sequence[RankSteps], warmup: int = WARMUP_STEPS) -> Turn:
        """The turn of all ranks together."""
        both = joined(ranks, warmup)
        seconds = both.seconds[warmup:]
        return cls(
            seconds=seconds,
            losses=both.losses,
            norms=both.norms,
            peak=both.peak,
            process=both.process,
            states=both.states,
            wait_fraction=sum(both.waited[warmup:]) / (sum(seconds) or 1.0),
        )


def joined(ranks: Sequence[RankSteps], warmup: int = WARMUP_STEPS) -> RankSteps:
    """All ranks as if they were one: the slowest of each step, the waits of the one that waits longest once it is warm,
    and the memory of the fullest."""
    fullest = max(ranks, key=lambda rank: rank.peak)
    return replace(
        fullest,
        seconds=tuple(max(step) for step in zip(*(rank.seconds for rank in ranks), strict=True)),
        waited=max((rank.waited for rank in ranks), key=lambda waited: sum(waited[warmup:])),
        losses=ranks[0].losses,
        norms=ranks[0].norms,
    )


@dataclass
class Case:
    """A recipe to measure on some ranks, or the reason why it cannot be."""

    name: str
    job: Job | None
    reason: str = ""
    measure: Measure = field(default=lambda job, num_steps: _on_ranks(job, num_steps))
    turns: list[Turn] = field(default_factory=list)

    @property
    def is_measured(self) -> bool:
        """Whether it has no reason and at least one turn."""
        return bool(self.turns) and not self.reason

    @property
    def seconds(self) -> Spread:
        """Seconds of a step, over all turns."""
        return Spread.of(second for turn in self.turns for second in turn.seconds)

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment of any turn."""
        return max(turn.peak for turn in self.turns)


def measure_in_turns(
    cases: Sequence[Case],
    *,
    steps: int,
    rounds: int,
    say: Callable[[str, int, int], None] = lambda *_: None,
    before_round: Callable[[], None] = lambda: None,
) -> None:
    """Measure all cases in turns, `steps` timed ones each. A case that fails gets its reason, and has no more turns.

    `say` is called before each turn with the name of the case, the number of the turn and the number of all turns;
    `before_round` before the first turn of each round.
    """
    per_round = -(-steps // rounds)
    total = rounds * len(cases)
    for number in range(rounds):
        before_round()
        for place, case in enumerate(cases if number % 2 == 0 else cases[::-1]):
            say(case.name, number * len(cases) + place, total)
            if case.job is None or case.reason:
                continue
            try:
                case.turns.append(Turn.of(case.measure(case.job, WARMUP_STEPS + per_round)))
            except ShoalError as error:
                case.reason = reason_of(error)


def reason_of(error: ShoalError) -> str:
    """The first problem of an error, in one line with its code."""
    first = error.problems[0]
    return f"{first.what.splitlines()[0]} [{first.code}]"


def ratios(case: Case, base: Case, factor: float = 1.0) -> Spread:
    """How many times as long as the base's a step of the case is, round by round: both were measured side by side."""
    pairs = zip(case.turns, base.turns, strict=False)
    return Spread.of(factor * turn.median / other.median for turn, other in pairs)


def differences(values: Mapping[str, Sequence[float]], base: Sequence[float]) -> dict[str, float]:
    """Name → the largest relative difference of any step's value from the base's; infinity if one is not finite."""
    pairs = {name: list(zip(series, base, strict=True)) for name, series in values.items()}
    return {name: max(_difference(own, other) for own, other in each) for name, each in pairs.items()}


def _difference(own: float, other: float) -> float:
    """Relative; never NaN, which no comparison would notice."""
    found = abs(own - other) / max(abs(other), 1e-30)
    return found if math.isfinite(found) else math.inf


def _on_ranks(job: Job, num_steps: int) -> Sequence[RankSteps]:
    settings, nproc = job.recipe.launch, job.recipe.plan.layout.world_size
    return launch(time_steps, (job, num_steps), nproc=nproc, timeout=settings.timeout)
