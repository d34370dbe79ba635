"""How long collectives took, and the two numbers of each algorithm that say how long others would take. No torch here.

A collective's list of messages (`shoal.blueprint.collectives.steps`) says how many rounds it has, and how many
bytes the longest message of each round carries, all rounds together: its critical path. So

    seconds = rounds x α + bytes on the critical path x β

and α and β are fitted to what was measured, for every collective and algorithm on its own. Sizes go over five decades,
so it is the relative error that counts: its square, so that no size is far off where the truth is a little bent; but of
a large one the error itself, since one size at which something disturbed the machine should not decide. Some sizes are
held out of the fit: the error there is what the two numbers are worth.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.blueprint.collectives.algorithms import ALGORITHMS, KINDS, Algorithm, Kind
from shoal.blueprint.collectives.steps import Steps, steps

Tier = Literal["within", "across"]
"""Between ranks of one host, or of several."""
TIERS: tuple[Tier, ...] = ("within", "across")
BUILTIN = "builtin"
"""torch's own collective."""
CHOICES: tuple[str, ...] = (*ALGORITHMS, BUILTIN)
SEND = "send"
"""Messages between two ranks: the wire."""
PAIR, TOGETHER = "pair", "together"
"""The algorithms of `SEND`: there and back between two ranks alone; every rank sends and receives at the same time."""
FLOAT = 4
"""Bytes of an element."""

TURNS = 50
"""In which rows that fit badly lose their weight."""
CLOSE = 0.1
"""Relative error of a fit at a size that was held out, up to which nobody asks again."""
FAR = 0.15
"""Relative errors above this one count as they are, and no longer by their squares."""
SEGMENTS = 4
"""Pieces that trees and chains pass on one after the other."""

BUILTIN_LIKE: dict[Kind, Algorithm] = {
    "all_reduce": "ring",
    "reduce_scatter": "ring",
    "all_gather": "ring",
    "broadcast": "tree",
    "all_to_all": "naive",
}
"""The list that stands for what gloo does inside. Whichever it is, a fit is as good: rounds stay the same and bytes go
with the size. Only what α and β are the price of is a guess."""

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
    """Bytes of the tensor: the whole one of a gather or scatter, what one rank gives of an all-to-all."""
    seconds: float
    """Measured: the fastest of some rounds, on the slowest rank."""
    rounds: int
    """By the list."""
    critical: int
    """Bytes on the critical path, by the list."""
    node: int | None = None
    """Ranks of a node, by which hierarchical goes."""
    counted: int | None = None
    """Bytes that the busiest rank has sent, counted; None: nobody counts inside of torch's own."""
    listed: int | None = None
    """The same by the list."""

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the tensor."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes/s that a rank has to receive at least for it: what can be held against a wire."""
        return self.bandwidth * _ON_THE_BUS[self.kind](self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A size that the fit has not seen."""

    size: int
    predicted: float
    """Seconds."""
    measured: float

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Two numbers for one algorithm of one collective."""

    tier: Tier
    kind: str
    algorithm: str
    alpha: float
    """Seconds of a round, however short its messages."""
    beta: float
    """Seconds of a byte on the critical path."""
    error: float
    """Mean relative error without sign at the sizes that were fitted to."""
    held: tuple[Held, ...]

    @property
    def worst_held(self) -> float:
        """The largest error without sign at sizes that were not; nan: none was held out."""
        return max((abs(each.error) for each in self.held), default=float("nan"))

    def seconds(self, rounds: int, critical: int) -> float:
        """Predicted."""
        return rounds * self.alpha + critical * self.beta


def list_of(kind: Kind, algorithm: str, ranks: int, size: int, *, node: int | None = None) -> Steps:
    """The messages of an algorithm over a tensor of so many bytes; of torch's own, those of the one that it is most
    like."""
    is_own = algorithm in ALGORITHMS
    chosen: Algorithm = algorithm if is_own else BUILTIN_LIKE[kind]  # type: ignore[assignment]
    return steps(kind, chosen, ranks, size // FLOAT, segments=SEGMENTS if is_own else 1, node=node)


def held_out(sizes: Sequence[int]) -> tuple[int, ...]:
    """Every third size, but neither the first nor the last: α needs the shortest and β the longest.

    >>> held_out([1, 4, 16, 64, 256, 1024, 4096])
    (16, 1024)
    """
    return tuple(size for number, size in enumerate(sizes[:-1]) if number % 3 == 2)


def fit(timings: Sequence[Timing], without: Iterable[int]) -> Fit:
    """α and β of one algorithm of one collective, from the sizes that are not held out."""
    apart = set(without)
    seen = [each for each in timings if each.size not in apart]
    seen = seen if has_two_sizes(seen) else list(timings)
    alpha, beta = _two_numbers([(each.rounds / each.seconds, each.critical / each.seconds) for each in seen])
    first = timings[0]
    errors = [abs((each.rounds * alpha + each.critical * beta) / each.seconds - 1) for each in seen]
    held = tuple(
        Held(size=each.size, predicted=each.rounds * alpha + each.critical * beta, measured=each.seconds)
        for each in timings
        if each not in seen
    )
    return Fit(
        tier=first.tier,
        kind=first.kind,
        algorithm=first.algorithm,
        alpha=alpha,
        beta=beta,
        error=statistics.fmean(errors),
        held=held,
    )


def _two_numbers(rows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """x and y, none below 0, such that a x + b y is about 1 for every row (a, b): the sum of squares of what is missing
    is as small as can be, but what is above `FAR` counts as it is, so that one row that is wrong does not spoil the
    others.

    >>> x, y = _two_numbers([(1.0, 0.0), (0.5, 0.25), (0.25, 0.375), (0.1, 0.01)])
    >>> round(x, 1), round(y, 1)
    (1.0, 2.0)
    """
    weights = [1.0] * len(rows)
    for _ in range(TURNS):
        x, y = _weighted(rows, weights)
        weights = [FAR / max(abs(a * x + b * y - 1), FAR) for a, b in rows]
    return x, y


def _weighted(rows: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """The same with the least sum of weighted squares."""
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
    """Tier, collective and algorithm → timings, in the order in which they were taken."""
    found: dict[tuple[Tier, str, str], list[Timing]] = {}
    for each in timings:
        found.setdefault((each.tier, each.kind, each.algorithm), []).append(each)
    return found


def fits(timings: Iterable[Timing]) -> list[Fit]:
    """One for each collective and algorithm that was measured at two sizes or more. Held out are some of the sizes that
    all of them were asked for."""
    listed = list(timings)
    apart = held_out(sorted({each.size for each in listed}))
    return [fit(each, apart) for each in grouped(listed).values() if has_two_sizes(each)]


def in_doubt(sizes: Sequence[int], fitted: Fit) -> set[int]:
    """Sizes at which something may have been disturbed: those that were held out and are not explained, and the ones
    before and after, to which the fit was made."""
    wrong = {held.size for held in fitted.held if abs(held.error) > CLOSE}
    around = {number + step for number, size in enumerate(sizes) if size in wrong for step in (-1, 0, 1)}
    return {size for number, size in enumerate(sizes) if number in around}


def has_two_sizes(timings: Iterable[Timing]) -> bool:
    """Whether there is enough to fit two numbers to: of one size, the wire would be infinitely fast, or the start."""
    return len({each.size for each in timings}) > 1


def best(timings: Iterable[Timing]) -> set[Timing]:
    """The fastest algorithm for each tier, collective and size."""
    found: dict[tuple[Tier, str, int], Timing] = {}
    for each in timings:
        key = each.tier, each.kind, each.size
        if each.kind in KINDS and (key not in found or each.seconds < found[key].seconds):
            found[key] = each
    return set(found.values())


def wire(timings: Iterable[Timing], tier: Tier, how: str = TOGETHER) -> float:
    """Bytes/s that a rank receives in messages of the best size, while all do or alone."""
    sends = [each.bandwidth for each in timings if (each.tier, each.kind, each.algorithm) == (tier, SEND, how)]
    return max(sends, default=float("nan"))
