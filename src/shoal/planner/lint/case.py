"""One plan under the rules of `lint.rules`: its numbers, the plans next to it, and their predicted savings.

Changes to a plan are keys and values (`{"tp": 8, "dp_shard": 16}`). Those that `check_plan` rejects are skipped, and so
are those that do not fit. All numbers are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import BARE_WORDS, Plan
from shoal.blueprint.validation.check import check_plan
from shoal.errors import ShoalError
from shoal.planner.candidates import can_cut, can_split, description_of, microbatches
from shoal.planner.search import SCHEDULES, search
from shoal.planner.task import Task
from shoal.predict.cluster import GIB
from shoal.predict.estimate.peak_memory import PeakMemory
from shoal.predict.estimate.rank_share import microbatch, num_microbatches
from shoal.predict.predict import Prediction

WORTH = 0.02
"""Fraction of a step: a smaller cost is not reported. An assumption, as the thresholds of `rules`."""

Change = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Saving:
    """The predicted saving of another plan. Below 0: a cost."""

    plan: Plan
    seconds: float
    """Of a step."""
    part: float
    """Of this plan's step."""
    bytes: float
    """Of the fullest rank."""

    def __str__(self) -> str:
        step, held = f"{percent(abs(self.part))} of the step", gib(abs(self.bytes))
        if abs(self.bytes) < 0.05 * GIB:
            return f"saves {step} (predicted)"
        if self.bytes < 0:
            return f"saves {step}, costs {held} (predicted)"
        return f"saves {held}, costs {step} (predicted)" if self.part < 0 else f"saves {step} and {held} (predicted)"

    def to_mapping(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"plan": self.plan.brief(), "step_s": self.seconds, "part": self.part, "memory_gib": self.bytes / GIB}


class Finding(NamedTuple):
    """A rule that is broken."""

    numbers: str
    fix: str
    saves: Saving | None = None


@dataclass(frozen=True)
class Case:
    """One plan, its prediction, and the search for cheaper plans next to it."""

    task: Task
    prediction: Prediction
    learning_rate: float | None = None
    """Chosen for batches of `base_batch`."""
    base_batch: int | None = None

    @property
    def plan(self) -> Plan:
        """Resolved."""
        return self.prediction.plan

    @property
    def mb(self) -> int:
        """Sequences of a microbatch."""
        return microbatch(self.plan, self.task.global_batch)

    @property
    def m(self) -> int:
        """Microbatches of a step."""
        return num_microbatches(self.plan, self.task.global_batch)

    def degree(self, axis: str) -> int:
        """Of an axis; `dp` are all ranks that see other samples."""
        return self.degree("dp_replicate") * self.degree("dp_shard") if axis == "dp" else getattr(self.plan, axis) or 1

    def part(self, *causes: str) -> float:
        """Fraction of the step that these causes take."""
        seconds = self.prediction.time.causes()
        return sum(seconds[cause] for cause in causes) / self.prediction.time.total

    def takes(self, *causes: str) -> str:
        """Format that fraction."""
        return f"{percent(self.part(*causes))} of the step (predicted)"

    def changed(self, change: Change) -> Plan | None:
        """The plan with a change; None if it could not run."""
        settings = {entry.name: getattr(self.plan, entry.name) for entry in fields(Plan)} | dict(change)
        settings |= {"schedule": None, "v": None} if settings["pp"] == 1 else {}
        settings |= {"context": None} if settings["cp"] == 1 else {}
        settings |= {"sp": None} if settings["tp"] == 1 else {}
        try:
            plan = Plan(**settings).resolve(self.task.cluster.num_devices)
        except ShoalError:
            return None
        return plan if _can_run(self.task, plan) else None

    def savings(self, changes: Iterable[Change], keeps: Callable[[Plan], bool] = lambda plan: True) -> list[Saving]:
        """Of those changes that can run and fit, the fastest first. None of them starves a pipeline."""
        plans = dict.fromkeys(plan for change in changes if (plan := self.changed(change)))
        candidates = [plan for plan in plans if plan != self.plan and keeps(plan) and not is_starved(self.task, plan)]
        fitting = [(plan, memory) for plan in candidates if self.task.fits(memory := self.task.memory(plan))]
        return sorted((self._saving(plan, memory) for plan, memory in fitting), key=lambda saving: -saving.seconds)

    def _saving(self, plan: Plan, memory: PeakMemory) -> Saving:
        seconds = self.prediction.time.total - self.task.time(plan).total
        return Saving(plan, seconds, seconds / self.prediction.time.total, self.prediction.memory.total - memory.total)

    def found(
        self,
        numbers: str,
        changes: Iterable[Change],
        *,
        otherwise: str = "",
        worth: float = WORTH,
        keeps: Callable[[Plan], bool] = lambda plan: True,
    ) -> Finding | None:
        """The fastest of the changes, if it saves enough; else the words of `otherwise`, if there are any."""
        best = next(iter(self.savings(changes, keeps)), None)
        if best is not None and best.part >= worth:
            return Finding(numbers, words(self.plan, best.plan), best)
        return Finding(numbers, otherwise) if otherwise else None

    def with_less_tp(self, numbers: str) -> Finding | None:
        """The fastest plan of all with less tp, where none of the plans next to this one would do."""
        degrees = [size for size in divisors(self.degree("tp")) if size < self.degree("tp")]
        same = {"precision": self.plan.precision, "offload": self.plan.offload}
        tried = (search(self.task, {"tp": size, **same}, keep=1).best for size in degrees)
        savings = [self._saving(best[0].plan, best[0].memory) for best in tried if best]
        best = max(savings, key=lambda saving: saving.seconds, default=None)
        return Finding(numbers, words(self.plan, best.plan), best) if best and best.part >= WORTH else None


def _can_run(task: Task, plan: Plan) -> bool:
    """By the rules of a run; that a model can divide its tokens is taken from a plan that says so."""
    tp, cp = plan.tp or 1, plan.cp or 1
    is_divided = can_split(task.workload, tp) and can_cut(task, tp, cp) and not (plan.sp and task.sequence % tp)
    return is_divided and not check_plan(
        replace(plan, sp=None),
        description=description_of(task.workload),
        batch=task.global_batch,
        sequence=task.sequence,
        compiles=task.compiles,
    )


def is_starved(task: Task, plan: Plan) -> bool:
    """Whether a pipeline has too few microbatches to fill, or a last round that is not whole."""
    m, pp = num_microbatches(plan, task.global_batch), plan.pp or 1
    return m < pp or bool(plan.schedule == "interleaved" and m % pp)


def words(plan: Plan, other: Plan) -> str:
    """Return the words of the other plan that differ.

    >>> words(Plan.parse("tp=16 zero=1 bf16").resolve(32), Plan.parse("tp=8 zero=1 bf16").resolve(32))
    'dp_shard=4 tp=8'
    """
    changes = {entry.name: getattr(other, entry.name) for entry in fields(Plan)}
    new = {key: value for key, value in changes.items() if value is not None and value != getattr(plan, key)}
    bare = {key for key, _ in BARE_WORDS.values()} - {"zero", "sp"}
    return " ".join(str(value) if key in bare else f"{key}={value}" for key, value in new.items())


def percent(part: float) -> str:
    """Format a fraction as a percentage.

    >>> percent(0.0234), percent(0.4)
    ('2.3 %', '40 %')
    """
    return f"{100 * part:.0f} %" if part >= 0.095 else f"{100 * part:.1f} %"


def gib(size: float) -> str:
    """Format bytes as GiB."""
    return f"{size / GIB:.1f} GiB"


# ---- plans next to a plan --------------------------------------------------------------------------------------------


def trades(case: Case, axis: str, *others: str) -> Iterator[Change]:
    """Ranks of an axis given to another one, by every factor. `dp` is the axis that takes what no other claims."""
    data = "dp_shard" if case.plan.zero else "dp_replicate"
    axis = data if axis == "dp" else axis
    for factor in divisors(case.degree(axis))[1:]:
        for other in (data if other == "dp" else other for other in others):
            if other != axis:
                yield {axis: case.degree(axis) // factor, other: case.degree(other) * factor}


def roomier(case: Case, changes: Iterable[Change]) -> Iterator[Change]:
    """Each of them, and with less on a rank: smaller microbatches, sharded parameters, recompute."""
    for change in changes:
        yield change
        yield from ({**change, "mb": size} for size in smaller_microbatches(case))
        yield from ({**change, "recompute": mode} for mode in ("selective", "full") if case.plan.recompute == "none")
        if case.plan.zero in (1, 2):
            yield {**change, "zero": 3}
        if case.plan.zero == 0:
            yield {**change, "zero": 3, "dp_shard": change.get("dp_replicate", case.degree("dp")), "dp_replicate": 1}


def smaller_microbatches(case: Case) -> list[int]:
    """The next few sizes below, and the smallest."""
    sizes = [size for size in divisors(case.mb) if size < case.mb]
    return sorted({*sizes[:1], *sizes[-3:]})


def any_microbatch(case: Case, changes: Iterable[Change]) -> Iterator[Change]:
    """Each of them with every size of microbatch that a rank's share allows."""
    for change in changes:
        ranks = [change.get(axis, case.degree(axis)) for axis in ("dp_replicate", "dp_shard")]
        share = case.task.global_batch // (ranks[0] * ranks[1])
        yield from ({**change, "mb": size} for size in (microbatches(share, None) if share else ()))


def hybrids(case: Case) -> Iterator[Change]:
    """Smaller groups that share the parameters, and more copies."""
    for size in divisors(case.degree("dp_shard"))[1:-1]:
        yield {"dp_shard": size, "dp_replicate": case.degree("dp") // size}


def schedules(case: Case) -> Iterator[Change]:
    """Other orders for the same pipeline."""
    yield from ({"schedule": word, "v": v} for word, v in SCHEDULES if case.plan.pp != 1)
