"""Search all legal plans of a task for the best that fit.

Divisibility leaves thousands to a hundred thousand plans. The search covers all of them. It skips the prediction of a
plan only by a rule that always holds:

    recompute   more of it is slower and smaller: once a plan fits, the next mode is not tried
    mb          larger microbatches take more memory: once none of the modes fits, only the largest is tried, of which
                there is one, and whose gradients need no memory of their own
    schedule    all schedules compute the same: one is tried only if, without any bubble, it could be among the best
    zero        in a pipeline, shoal holds for 2 and 3 what it holds for 1 (`predict.exact.state_memory`)

Predictions cannot distinguish plans within 5 % of the best: of these, the simplest comes first. `check_plan` accepts
every plan that the search returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from shoal.blueprint.plan import Plan, Recompute
from shoal.blueprint.schedules.schedule_orders import check_schedule
from shoal.planner.candidates import check_candidate, largest_microbatch, layouts, microbatches
from shoal.planner.task import Task
from shoal.predict.predict import Prediction

By = Literal["time", "memory", "money"]
Required = Plan | Mapping[str, Any] | None
SCHEDULES: tuple[tuple[str, int], ...] = (
    ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb", 1), ("zbv", 2), ("dualpipev", 2),
)  # fmt: skip
"""Schedules to try, with their stages per rank. gpipe and looped take more memory than 1f1b and interleaved for the
same bubble, and are tried only if they are required."""
SAME = 0.01
"""A relative difference of time that is not worth reporting: an assumption."""
EQUAL = 1.05
"""Predictions closer than this are equal: errors are larger. `shoal backtest` picks the one on fewest axes of them. It
was chosen on its tables, where it hardly matters between 1.03 and 1.15 (docs/concepts/planner.md)."""
MODES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass
class SearchResult:
    """The plans that a search found, and its counts."""

    best: list[Prediction] = field(default_factory=list)
    """One for each layout and stage of sharding, the best first."""
    frontier: list[Prediction] = field(default_factory=list)
    """Plans of which no other is both faster and smaller, from the fastest to the smallest."""
    smallest: Prediction | None = None
    """The one that takes least memory, whether it fits or not."""
    rejection_reasons: dict[str, str] = field(default_factory=dict)
    """Why plans that fit cannot run → the fix."""
    num_predicted: int = 0
    num_too_large: int = 0
    num_left_out: int = 0
    """Layouts that fit, and that one of the best dominates."""


class Candidate(NamedTuple):
    """A plan that fits the memory, with its predicted memory and time. Not each of them was checked to run."""

    plan: Plan
    bytes: float
    seconds: float


def search(
    task: Task,
    required: Required = None,
    *,
    keep: int = 5,
    by: By = "time",
    seen: list[Candidate] | None = None,
) -> SearchResult:
    """Return the best plans of a task. Every plan has the words of `required`: keys and values, or a plan, of which the
    words that are not defaults count. `seen` receives every plan that fits."""
    searching = _Search(task, required, keep, by, seen)
    for layout in layouts(task, searching.required):
        searching.look_at(layout)
    found = searching.found
    ranked = searching.ranked()
    good = _undominated(ranked)
    found.best, found.num_left_out = good[:keep], len(ranked) - len(good)
    found.frontier = _frontier(searching.fitting.values())
    return found


class _Search:
    """The state of one search."""

    def __init__(self, task: Task, required: Required, keep: int, by: By, seen: list[Candidate] | None = None) -> None:
        self.seen = seen
        self.given = set(required.to_mapping() if isinstance(required, Plan) else required or {})
        self.required = Plan.of(required) if required is not None else Plan(precision="bf16")
        self.task, self.keep, self.by = task, keep, by
        self.found = SearchResult()
        self.kept: dict[tuple[Any, ...], Prediction] = {}
        self._totals: dict[tuple[Any, ...], float] = {}  # seconds of each that is kept
        self._fastest: dict[tuple[Any, ...], float] = {}  # seconds of the fastest of each that was tried
        self.fitting: dict[tuple[Any, ...], Prediction] = {}
        self._worst = math.inf

    def look_at(self, layout: Mapping[str, Any]) -> None:
        """Try every microbatch size, recompute mode and schedule of one layout."""
        share = self.task.global_batch // (layout["dp_replicate"] * layout["dp_shard"])
        if ("schedule" in self.given or (self.required.v or 1) > 1) and layout["pp"] == 1:
            return  # both need a pipeline; v=1 does not
        if "context" in self.given and layout["cp"] == 1:
            return
        modes = (self.required.recompute,) if "recompute" in self.given else self._modes(layout)
        sizes = microbatches(share, self.required.mb, largest_microbatch(self.task, share))
        is_full = False
        for mb in sizes:
            if is_full and mb != sizes[-1]:
                continue
            plan = self._plan(layout, mb, share // mb)
            if plan is None:
                continue
            fits = False
            for mode in modes:
                fits |= self._predict(replace(plan, recompute=mode) if mode != "none" else plan, share // mb)
                if fits and self.by != "memory":
                    break
            is_full = not fits

    def _modes(self, layout: Mapping[str, Any]) -> tuple[Recompute, ...]:
        return ("none", "full") if layout["ep"] > 1 else MODES

    def _plan(self, layout: Mapping[str, Any], mb: int, count: int) -> Plan | None:
        """Return the plan with the schedule that always runs; None if the required schedule does not."""
        schedule, v = None, 1
        if layout["pp"] > 1:
            schedule, v = self._schedules()[0]
            if wrong := check_schedule(schedule, num_ranks=layout["pp"], v=v, num_microbatches=count):
                self.found.rejection_reasons.setdefault(wrong[0].what, wrong[0].fix)
                return None
        return Plan(
            **layout,
            schedule=schedule,  # type: ignore[arg-type]
            v=v,
            mb=mb,
            context=("ring" if self.required.context is None else self.required.context) if layout["cp"] > 1 else None,
            sp=self.required.sp if layout["tp"] > 1 else None,
            precision=self.required.precision,
            offload=self.required.offload,
            compress=self.required.compress
            if layout["dp_replicate"] > 1
            else None,  # else there is no replica to send to
            sync=self.required.sync if layout["dp_replicate"] > 1 else None,
        )

    def _schedules(self) -> tuple[tuple[str, int], ...]:
        if self.required.schedule is None and self.required.v is None:
            return SCHEDULES
        resolved = replace(self.required, pp=2, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1, mb=None, sp=None, zero=0)
        resolved = replace(resolved, context=None, offload="none", compress=None, sync=None).resolve(2)
        assert resolved.schedule is not None
        return ((resolved.schedule, resolved.v or 1),)

    def _predict(self, plan: Plan, count: int) -> bool:
        """Predict a plan with its first schedule, and with the others if it fits. Return whether it fits."""
        memory = self.task.memory(plan)
        self.found.num_predicted += 1
        least = self.found.smallest
        if (least is None or memory.total < least.memory.total) and not check_candidate(self.task, plan):
            self.found.smallest = Prediction(plan, memory, self.task.time(plan))
        if not self.task.fits(memory):
            self.found.num_too_large += 1
            return False
        first = Prediction(plan, memory, self.task.time(plan))
        self._enter(first)
        if plan.pp == 1:
            return True
        without_bubble = first.time.total - first.time.bubble
        for schedule, v in self._schedules()[1:]:
            if without_bubble > self._worst or check_schedule(
                schedule, num_ranks=plan.pp or 1, v=v, num_microbatches=count
            ):
                continue
            if schedule in ("zb", "zbv", "dualpipev") and plan.recompute != "none":
                continue
            other = replace(plan, schedule=schedule, v=v)  # type: ignore[arg-type]
            if (plan.pp or 1) * v <= self.task.workload.layers and self.task.fits(held := self.task.memory(other)):
                self.found.num_predicted += 1
                self._enter(Prediction(other, held, self.task.time(other)))
        return True

    def _enter(self, prediction: Prediction) -> None:
        """Keep a prediction if it is among the best, or on the frontier."""
        if self.seen is not None:
            self.seen.append(Candidate(prediction.plan, prediction.memory.total, prediction.time.total))
        corner = (round(prediction.memory.total / 2**30), prediction.plan.recompute)
        held = self.fitting.get(corner)
        is_corner = held is None or prediction.time.total < held.time.total
        plan = prediction.plan
        key = (plan.tp, plan.pp, plan.cp, plan.ep, plan.dp_shard, plan.zero)
        is_best = key not in self.kept or self._is_better(prediction, self.kept[key], self._fastest[key])
        if not (is_corner or is_best):
            return
        if wrong := check_candidate(self.task, plan):
            self.found.rejection_reasons.setdefault(wrong[0].what, wrong[0].fix)
            return
        if is_corner:
            self.fitting[corner] = prediction
        if is_best:
            self.kept[key], self._totals[key] = prediction, prediction.time.total
            self._fastest[key] = min(prediction.time.total, self._fastest.get(key, math.inf))
            if len(self.kept) >= self.keep and self.by == "time":
                self._worst = sorted(self._totals.values())[self.keep - 1]

    def rank(self, prediction: Prediction) -> tuple[float, float]:
        """The sort key: the best has the smallest."""
        time, memory = prediction.time.total, prediction.memory.total
        return (memory, time) if self.by == "memory" else (time, memory)

    def _is_better(self, one: Prediction, other: Prediction, fastest: float) -> bool:
        """Compare two plans of one layout. Of two that are as fast as the fastest, the one with fewer microbatches is
        better: several small losses must not add up."""
        if self.by == "memory":
            return self.rank(one) < self.rank(other)
        change = one.time.total / other.time.total - 1
        is_as_fast = one.time.total <= fastest * (1 + SAME)
        return change < -SAME or (is_as_fast and change <= SAME and (one.plan.mb or 0) > (other.plan.mb or 0))

    def ranked(self) -> list[Prediction]:
        """Return the best first, or before it the simplest of those that are as fast. No plan comes first that another
        beats in both time and memory."""
        ordered = sorted(self.kept.values(), key=self.rank)
        if not ordered or self.by == "memory":
            return ordered
        near = [one for one in ordered if one.time.total <= ordered[0].time.total * EQUAL]
        good = [one for number, one in enumerate(near) if not any(_is_smaller(other, one) for other in near[:number])]
        simplest = min(good, key=lambda one: (complexity(one.plan), one.time.total))
        return [simplest, *(one for one in ordered if one is not simplest)]


def _is_smaller(one: Prediction, other: Prediction) -> bool:
    return one.memory.total < other.memory.total


def complexity(plan: Plan) -> float:
    """Return a score of how many concepts a plan uses. Its weights are assumptions: an axis is worth more than any
    stage of sharding. They choose among plans that are `EQUAL`, and order nothing else."""
    axes = sum((degree or 1) > 1 for degree in (plan.tp, plan.cp, plan.pp, plan.ep))
    hybrid = (plan.dp_replicate or 1) > 1 and (plan.dp_shard or 1) > 1
    schedule = 0.0 if plan.schedule in (None, "1f1b", "gpipe") else 0.5
    return axes + 0.3 * (plan.zero or 0) + 0.5 * hybrid + 0.4 * MODES.index(plan.recompute) + schedule


def _undominated(ranked: list[Prediction]) -> list[Prediction]:
    """Drop each plan that another one dominates: no slower, no larger and no more complex."""
    chosen: list[Prediction] = []
    for one in ranked:
        if not any(
            other.time.total <= one.time.total * EQUAL
            and other.memory.total <= one.memory.total * EQUAL
            and complexity(other.plan) <= complexity(one.plan)
            for other in chosen
        ):
            chosen.append(one)
    return chosen


LESS_MEMORY = "less memory for more time"
AS_FAST = "less memory and no more time"
LESS_TIME = "less time for more memory"


def tradeoffs(best: Prediction, frontier: Iterable[Prediction]) -> dict[str, list[Prediction]]:
    """Group the plans of a frontier by their tradeoff against the chosen plan."""
    found: dict[str, list[Prediction]] = {AS_FAST: [], LESS_MEMORY: [], LESS_TIME: []}
    for one in frontier:
        if one.memory.total < best.memory.total:
            found[LESS_MEMORY if one.time.total > best.time.total else AS_FAST].append(one)
        elif one.time.total < best.time.total and one.memory.total > best.memory.total:
            found[LESS_TIME].append(one)
    return {label: plans for label, plans in found.items() if plans}


def why_not(best: Prediction, other: Prediction, by: By = "time") -> str:
    """Why a plan that is faster than the chosen one, or as fast and smaller, was not chosen; empty: it is slower."""
    faster = 1 - other.time.total / best.time.total
    if faster < 0:
        return ""
    if by == "memory":
        return "--by memory chooses the smallest"
    near = f"{faster:.1%} faster: predictions within 5 % are equal" if faster >= 0.0005 else "no faster"
    if complexity(best.plan) < complexity(other.plan):
        return f"{near}, and the first is simpler"
    if best.memory.total < other.memory.total:
        return f"{near}, and the first needs less memory"
    return f"{near}, and the first has fewer microbatches" if (best.plan.mb or 0) > (other.plan.mb or 0) else near


def _frontier(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Return the Pareto frontier from the fastest plan on; each is at least 1 % smaller than the one before."""
    chosen: list[Prediction] = []
    for prediction in sorted(predictions, key=lambda one: (one.time.total, one.memory.total)):
        if not chosen or prediction.memory.total < 0.99 * chosen[-1].memory.total:
            chosen.append(prediction)
    return chosen
