"""How good predictions are: errors by source, regret and rank by cell, recall of failures, coverage of intervals.

error       predicted / measured - 1; absolute, unless it is called signed
regret      of a cell (one model and batch on as many devices): measured time of the plan that is picked (`_pick`) over
            the fastest measured, less 1; among plans that ran
halves      the same where a coin decides of each run whether it is known: one lucky run makes or breaks a cell, and
            many draws show how much of a regret is luck
rank        Spearman's correlation of predicted and measured times in a cell
recall      part of the runs that failed for which no fit was predicted; precision: part of those predictions that were
            right
coverage    part of the measured times inside the interval, which is meant to hold 80 %
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from shoal.planner.backtest.predict import Prediction, predict
from shoal.planner.backtest.rows import Row
from shoal.predict.estimate.step_time import UNKNOWN_FRAMEWORK


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Of one kind, over some rows."""

    count: int
    mean: float
    median: float
    signed: float
    """Median with its sign: above 0, too much was predicted."""


def errors(pairs: Iterable[tuple[float, float]]) -> Errors | None:
    """Of pairs of predicted and measured."""
    off = [predicted / measured - 1 for predicted, measured in pairs if measured > 0]
    if not off:
        return None
    sizes = [abs(error) for error in off]
    return Errors(count=len(off), mean=mean(sizes), median=median(sizes), signed=median(off))


def times(found: Iterable[Prediction]) -> list[tuple[float, float]]:
    """Predicted and measured seconds of rows that have both."""
    return [
        (one.predicted_s, one.measured_s)
        for one in found
        if one.predicted_s and one.measured_s and one.counts_time and not one.row.failed
    ]


def memories(found: Iterable[Prediction]) -> list[tuple[float, float]]:
    """Predicted and measured GiB of rows that have both."""
    return [
        (one.predicted_gib, one.measured_gib)
        for one in found
        if one.predicted_gib and one.measured_gib and not one.row.failed
    ]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Runs of one model with one batch on as many devices of one kind: the choices of one task."""

    source: str
    model: str
    devices: int
    count: int
    regret: float
    rank: float
    pick: str
    best: str
    is_repeat: bool = False
    """Whether the pick is another run of the fastest one's plan and model: what differs is what was measured."""


def cells(found: Iterable[Prediction], *, least: int = 5) -> list[Cell]:
    """All cells that have at least `least` runs."""
    return [_cell(runs) for runs in grouped(found) if len(runs) >= least]


TASK = ("model", "layers", "hidden", "seq", "gpu", "n_gpus", "global_batch", "precision")
"""What is given; everything else of a row is what the planner may choose."""


def grouped(found: Iterable[Prediction]) -> list[list[Prediction]]:
    """Runs of every cell that have both times."""
    groups: dict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for one in found:
        if one.predicted_s and one.measured_s and one.counts_time and not one.row.failed:
            groups[one.row.family, *(one.row.text(column) for column in TASK)].append(one)
    return [runs for _, runs in sorted(groups.items())]


def _cell(runs: Sequence[Prediction]) -> Cell:
    pick, best = _pick(runs), _best(runs)
    row = runs[0].row
    return Cell(
        source=row.family,
        model=row.text("model"),
        devices=row.whole("n_gpus") or 0,
        count=len(runs),
        regret=_regret(runs),
        rank=spearman([one.predicted_s or 0.0 for one in runs], [one.measured_s or 0.0 for one in runs]),
        pick=_brief(pick, best),
        best=_brief(best, pick),
        is_repeat=pick is not best and _plan(pick) == _plan(best) and not _apart(pick, best),
    )


NEAR = 0.05
"""Plans predicted this close to the fastest count as equally fast: `EQUAL` of `planner.search`. For an unmeasured
system it is more, as its intervals are wider (`UNKNOWN_FRAMEWORK`)."""


def _pick(runs: Sequence[Prediction]) -> Prediction:
    """Return the run that the planner would recommend: of those that fit and are predicted as fast as the fastest, the
    one on fewest axes. Each axis adds a risk that no prediction includes."""
    fitting = [one for one in runs if one.fits] or runs
    is_unknown = any(one.profile and not one.profile.is_known for one in runs)
    limit = min(one.predicted_s or 0.0 for one in fitting) * (1 + NEAR * (UNKNOWN_FRAMEWORK if is_unknown else 1.0))
    near = [one for one in fitting if (one.predicted_s or 0.0) <= limit]
    return min(near, key=lambda one: (_num_axes(one), one.predicted_s or 0.0))


def _num_axes(one: Prediction) -> int:
    """Axes beside those of the data."""
    plan = one.plan
    return sum((degree or 1) > 1 for degree in (plan.tp, plan.pp, plan.cp, plan.ep)) if plan else 0


def _best(runs: Sequence[Prediction]) -> Prediction:
    return min(runs, key=lambda one: one.measured_s or 0.0)


def _regret(runs: Sequence[Prediction]) -> float:
    return (_pick(runs).measured_s or 0.0) / (_best(runs).measured_s or 1.0) - 1


DRAWS = 200
"""Random halves of a table: enough for the mean to be stable, an assumption."""


@dataclass(frozen=True, kw_only=True)
class Halves:
    """Mean regret over the cells of a source, where only a random half of its runs is known."""

    mean: float
    """Of all draws."""
    high: float
    """At most that much in 9 of 10 draws."""
    close: float
    """Part of all picks, of all cells and draws, that are within 15 % of the fastest."""


def halves(found: Iterable[Prediction], *, least: int = 5) -> dict[str, Halves]:
    """Source → regret among random halves of its runs. The draws are the same every time."""
    sources: dict[str, list[list[Prediction]]] = defaultdict(list)
    for runs in grouped(found):
        if len(runs) >= 2 * least:
            sources[runs[0].row.family].append(runs)
    return {name: _halves(groups, least) for name, groups in sources.items()}


def _halves(groups: Sequence[Sequence[Prediction]], least: int) -> Halves:
    coin = random.Random(0)
    draws = []
    for _ in range(DRAWS):
        known = [[one for one in runs if coin.random() < 0.5] for runs in groups]
        draws.append([_regret(runs) for runs in known if len(runs) >= least])
    means = sorted(mean(draw) for draw in draws if draw)
    picks = [regret for draw in draws for regret in draw]
    return Halves(
        mean=mean(means), high=means[int(0.9 * (len(means) - 1))], close=mean(regret <= 0.15 for regret in picks)
    )


SHAPE = ("heads", "kv_heads", "ffn", "vocab", "vpp", "recompute", "zero_stage", "seq")
"""Columns in which two runs of a cell may differ although their plans are the same."""


def _brief(one: Prediction, other: Prediction) -> str:
    """The plan of a run; and where another run of the cell has the same, in what they differ, or where it stands."""
    if one is other or _plan(one) != _plan(other):
        return _plan(one)
    apart = ", ".join(f"{name} {one.row.text(name)}" for name in _apart(one, other))
    return f"{_plan(one)} ({apart or one.row.place})"


def _plan(one: Prediction) -> str:
    return one.plan.brief() if one.plan else ""


def _apart(one: Prediction, other: Prediction) -> list[str]:
    return [name for name in SHAPE if one.row.text(name) != other.row.text(name)]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks; equal values share theirs.

    >>> spearman([1, 2, 3], [10, 20, 15])
    0.5
    """
    a, b = _ranks(first), _ranks(second)
    mean_a, mean_b = mean(a), mean(b)
    both = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    norm = (sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)) ** 0.5
    return float(both / norm) if norm else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for i in order[start : end + 1]:
            ranks[i] = (start + end) / 2
        start = end + 1
    return ranks


@dataclass(frozen=True, kw_only=True)
class Fits:
    """Failures that were predicted, and false alarms."""

    failed: int
    predicted: int
    """Of those that failed."""
    alarms: int
    """Predictions that a run would not fit."""

    @property
    def recall(self) -> float:
        """Part of the failures that were predicted."""
        return self.predicted / self.failed if self.failed else 0.0

    @property
    def precision(self) -> float:
        """Part of the alarms that were right."""
        return self.predicted / self.alarms if self.alarms else 0.0


def fits(found: Iterable[Prediction]) -> Fits | None:
    """Score the rows of tables that list failures, where the plan could be predicted."""
    known = [one for one in found if one.fits is not None]
    families = {one.row.family for one in known if one.row.failed}
    scored = [one for one in known if one.row.family in families]
    if not scored:
        return None
    failed = [one for one in scored if one.row.failed]
    return Fits(
        failed=len(failed),
        predicted=sum(not one.fits for one in failed),
        alarms=sum(not one.fits for one in scored),
    )


def coverage(found: Iterable[Prediction]) -> tuple[int, float] | None:
    """Rows, and the part of them whose measured time lies in the interval."""
    inside = [
        one.time.low <= one.measured_s <= one.time.high
        for one in found
        if one.time and one.measured_s and one.counts_time and not one.row.failed
    ]
    return (len(inside), mean(inside)) if inside else None


def by_source(found: Iterable[Prediction]) -> dict[str, list[Prediction]]:
    """Rows of every source."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for one in found:
        groups[one.row.family].append(one)
    return dict(sorted(groups.items()))


# ---- without what is known of a system ------------------------------------------------------------------------------


def blind(rows: Sequence[Row]) -> list[Prediction]:
    """Each row predicted without any figure that was measured on its system, only with what its documentation says.

    What a new system costs on the whole is learnt from the other sources: times are multiplied by the median, over
    them, of their median of measured over predicted.
    """
    found = [predict(row, is_blind=True) for row in rows]
    ratios = {
        name: median(measured / predicted for predicted, measured in pairs)
        for name, group in by_source(found).items()
        if len(pairs := times(group)) >= 3
    }
    factors = {
        name: median(others) if (others := [ratio for other, ratio in ratios.items() if other != name]) else 1.0
        for name in {one.row.family for one in found}
    }
    return [one.slower(factors[one.row.family]) for one in found]
