"""Timings of collectives, and a fit of latency and bandwidth to them, by which others are predicted. No torch here.

A collective's list of messages (`shoal.blueprint.collectives.steps`) gives its number of rounds and its critical path:
the bytes of the longest message of each round, summed over rounds. So

    seconds = rounds x α + bytes on the critical path x β

and α and β are fitted to measured times, for every collective and algorithm separately. Sizes span five decades, so
the fit minimises relative errors with a Huber loss: squares of small errors, so that no size is far off, and absolute
values of large ones, so that one disturbed size does not decide. Some sizes are held out for validation: the error
there says how well α and β predict.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.blueprint.collectives.algorithms import ALGORITHMS, KINDS, Algorithm, Kind
from shoal.blueprint.collectives.steps import Steps, steps

Tier = Literal["within", "across"]
"""Between ranks of one host, or across hosts."""
TIERS: tuple[Tier, ...] = ("within", "across")
BUILTIN = "builtin"
"""torch's own collective."""
CHOICES: tuple[str, ...] = (*ALGORITHMS, BUILTIN)
SEND = "send"
"""Point-to-point messages, which measure the link."""
PAIR, TOGETHER = "pair", "together"
"""The algorithms of `SEND`: ping-pong between two ranks; every rank sends and receives at the same time."""
FLOAT = 4
"""Bytes of an element."""

REWEIGHTINGS = 50
"""Iterations of the weighted least squares."""
CLOSE = 0.1
"""Relative error at a validation size up to which it is not measured again."""
FAR = 0.15
"""Relative error above which the Huber loss is linear."""
SEGMENTS = 4
"""Segments that trees and chains send one after the other."""

BUILTIN_LIKE: dict[Kind, Algorithm] = {
    "all_reduce": "ring",
    "reduce_scatter": "ring",
    "all_gather": "ring",
    "broadcast": "tree",
    "all_to_all": "naive",
}
"""The list of messages that stands in for gloo's own. The fit is equally good with any: rounds are constant, and bytes
are proportional to the size. Only the meaning of α and β is approximate."""

_ON_THE_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    SEND: lambda n: 1.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One collective by one algorithm at one size."""

    tier: Tier
    kind: str
    """One of `KINDS`, or `SEND`."""
    algorithm: str
    """One of `CHOICES`; of a send, `PAIR` or `TOGETHER`."""
    ranks: int
    size: int
    """Bytes of the tensor: the full tensor of a gather or scatter, one rank's input of an all-to-all."""
    seconds: float
    """Measured: the fastest of some rounds, on the slowest rank."""
    rounds: int
    """Of the list of messages."""
    critical: int
    """Bytes on the critical path of the list."""
    node: int | None = None
    """Ranks of a node, for the hierarchical algorithm."""
    counted: int | None = None
    """Bytes that the busiest rank has sent, counted; None: torch's own collectives are not counted."""
    listed: int | None = None
    """Bytes that the busiest rank sends by the list."""

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the tensor."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes/s that a rank must receive at least: the number to compare with the link."""
        return self.bandwidth * _ON_THE_BUS[self.kind](self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPoint:
    """A size that is not in the fit."""

    size: int
    predicted: float
    """Seconds."""
    measured: float

    @property
    def error(self) -> float:
        """The relative error, with its sign."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """α and β of one algorithm of one collective."""

    tier: Tier
    kind: str
    algorithm: str
    alpha: float
    """Seconds of a round without bytes."""
    beta: float
    """Seconds per byte on the critical path."""
    error: float
    """Mean absolute relative error at the fitted sizes."""
    validation: tuple[ValidationPoint, ...]

    @property
    def worst_error(self) -> float:
        """The largest absolute relative error at the validation sizes; nan: there are none."""
        return max((abs(each.error) for each in self.validation), default=float("nan"))

    def seconds(self, rounds: int, critical: int) -> float:
        """Predicted seconds."""
        return rounds * self.alpha + critical * self.beta


def list_of(kind: Kind, algorithm: str, ranks: int, size: int, *, node: int | None = None) -> Steps:
    """The messages of an algorithm for a tensor of `size` bytes; for torch's own, those of the most similar
    algorithm."""
    is_own = algorithm in ALGORITHMS
    chosen: Algorithm = algorithm if is_own else BUILTIN_LIKE[kind]  # type: ignore[assignment]
    return steps(kind, chosen, ranks, size // FLOAT, segments=SEGMENTS if is_own else 1, node=node)


def validation_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Every third size, but neither the first nor the last: α needs the shortest and β the longest.

    >>> validation_sizes([1, 4, 16, 64, 256, 1024, 4096])
    (16, 1024)
    """
    return tuple(size for number, size in enumerate(sizes[:-1]) if number % 3 == 2)


def fit(timings: Sequence[Timing], without: Iterable[int]) -> Fit:
    """Fit α and β of one algorithm of one collective to the sizes that are not in `without`."""
    excluded = set(without)
    fitted = [each for each in timings if each.size not in excluded]
    fitted = fitted if has_two_sizes(fitted) else list(timings)
    alpha, beta = _two_numbers([(each.rounds / each.seconds, each.critical / each.seconds) for each in fitted])
    first = timings[0]
    errors = [abs((each.rounds * alpha + each.critical * beta) / each.seconds - 1) for each in fitted]
    points = tuple(
        ValidationPoint(size=each.size, predicted=each.rounds * alpha + each.critical * beta, measured=each.seconds)
        for each in timings
        if each not in fitted
    )
    return Fit(
        tier=first.tier,
        kind=first.kind,
        algorithm=first.algorithm,
        alpha=alpha,
        beta=beta,
        error=statistics.fmean(errors),
        validation=points,
    )


def _two_numbers(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Non-negative x and y such that a x + b y is about 1 for every row (a, b), with the least Huber loss.

    >>> x, y = _two_numbers([(1.0, 0.0), (0.5, 0.25), (0.25, 0.375), (0.1, 0.01)])
    >>> round(x, 1), round(y, 1)
    (1.0, 2.0)
    """
    weights = [1.0] * len(rows)
    for _ in range(REWEIGHTINGS):
        x, y = _weighted(rows, weights)
        weights = [FAR / max(abs(a * x + b * y - 1), FAR) for a, b in rows]
    return x, y


def _weighted(rows: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Non-negative x and y with the least sum of weighted squares."""
    both = list(zip(rows, weights, strict=True))
    aa, bb, ab = (sum(w * row[i] * row[j] for row, w in both) for i, j in ((0, 0), (1, 1), (0, 1)))
    sum_a, sum_b = (sum(w * row[i] for row, w in both) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        x, y = (bb * sum_a - ab * sum_b) / determinant, (aa * sum_b - ab * sum_a) / determinant
        if x >= 0 and y >= 0:
            return x, y
    alone = [(sum_a / aa, 0.0)] * bool(aa) + [(0.0, sum_b / bb)] * bool(bb)
    return min(alone, key=lambda xy: sum(w * (a * xy[0] + b * xy[1] - 1) ** 2 for (a, b), w in both))


def grouped(timings: Iterable[Timing]) -> dict[tuple[Tier, str, str], list[Timing]]:
    """Tier, collective and algorithm → timings, in the order of measurement."""
    found: dict[tuple[Tier, str, str], list[Timing]] = {}
    for each in timings:
        found.setdefault((each.tier, each.kind, each.algorithm), []).append(each)
    return found


def fits(timings: Iterable[Timing]) -> list[Fit]:
    """Fit each collective and algorithm that was measured at two sizes or more. All have the same validation
    sizes."""
    listed = list(timings)
    excluded = validation_sizes(sorted({each.size for each in listed}))
    return [fit(each, excluded) for each in grouped(listed).values() if has_two_sizes(each)]


def in_doubt(sizes: Sequence[int], fitted: Fit) -> set[int]:
    """Sizes whose measurement may have been disturbed: validation sizes with a large error, and the sizes before and
    after them, which are in the fit."""
    wrong = {point.size for point in fitted.validation if abs(point.error) > CLOSE}
    around = {number + step for number, size in enumerate(sizes) if size in wrong for step in (-1, 0, 1)}
    return {size for number, size in enumerate(sizes) if number in around}


def has_two_sizes(timings: Iterable[Timing]) -> bool:
    """Whether α and β can be fitted: with one size, one of them would be zero."""
    return len({each.size for each in timings}) > 1


def best(timings: Iterable[Timing]) -> set[Timing]:
    """The fastest algorithm for each tier, collective and size."""
    found: dict[tuple[Tier, str, int], Timing] = {}
    for each in timings:
        key = each.tier, each.kind, each.size
        if each.kind in KINDS and (key not in found or each.seconds < found[key].seconds):
            found[key] = each
    return set(found.values())


def link_bandwidth(timings: Iterable[Timing], tier: Tier, how: str = TOGETHER) -> float:
    """Bytes/s that a rank receives in messages of the best size, while all send (`TOGETHER`) or alone (`PAIR`)."""
    sends = [each.bandwidth for each in timings if (each.tier, each.kind, each.algorithm) == (tier, SEND, how)]
    return max(sends, default=float("nan"))
