"""Alternatives to the best plan: each differs from it in one change, and has one line of reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.blueprint.plan import Plan
from shoal.errors import ShoalError
from shoal.planner.candidates import can_split, check_candidate
from shoal.planner.search import EQUAL, MODES, SAME, SCHEDULES, complexity
from shoal.planner.task import Task
from shoal.predict.estimate.peak_memory import PeakMemory
from shoal.predict.predict import Prediction


@dataclass(frozen=True, slots=True)
class Rejected:
    """An alternative, and why it was rejected."""

    move: str
    plan: str
    reason: str

    def to_mapping(self) -> dict[str, str]:
        """Return it as JSON values."""
        return {"move": self.move, "plan": self.plan, "reason": self.reason}


def alternatives(task: Task, best: Prediction) -> list[Rejected]:
    """Return every plan that differs in one change, with its effect."""
    found = [_compare(task, best, move, changes) for move, changes in single_changes(task, best.plan)]
    unknown = [] if task.workload.is_transformer else [a for a in ("tp", "cp") if not task.workload.is_left_out(a)]
    if unknown:
        what = "left out: a trace does not show what each head costs, so it is not known what divides"
        found.append(Rejected(", ".join(unknown), "", what))
    for reason in dict.fromkeys(reason for _, reason in task.workload.left_out):
        axes = ", ".join(axis for axis, why in task.workload.left_out if why == reason)
        found.append(Rejected(axes, "", f"left out, a run rejects it: {task.workload.name} {reason}"))
    return found


def single_changes(task: Task, plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Double or halve each axis, and try the other modes; data parallelism takes the ranks that are left."""
    data = {"dp_shard": None, "dp_replicate": None}
    by_heads = ("tp", "cp") if task.workload.is_transformer else ()
    for axis in ("pp", *by_heads, *(("ep",) if task.workload.experts else ())):
        if task.workload.is_left_out(axis):
            continue
        degree = getattr(plan, axis) or 1
        for other in (degree * 2, degree // 2):
            if other >= 1:
                more: dict[str, Any] = {} if axis == "ep" else data
                if axis == "pp" and 1 in (other, degree):
                    more = {**more, "schedule": None, "v": None}
                if axis == "cp":
                    more = {**more, "context": None}
                yield f"{axis} {degree} → {other}", {axis: other, **more}
    if (plan.dp_replicate or 1) * (plan.dp_shard or 1) * (plan.cp or 1) > 1:
        for zero in (0, 1, 2, 3):
            if zero != plan.zero and not (plan.pp != 1 and zero > 1):
                yield f"zero {plan.zero} → {zero}", {"zero": zero, **data}
    for mode in MODES:
        if mode != plan.recompute:
            yield f"recompute {plan.recompute} → {mode}", {"recompute": mode}
    for mb in ((plan.mb or 1) * 2, (plan.mb or 1) // 2):
        if mb >= 1:
            yield f"mb {plan.mb} → {mb}", {"mb": mb}
    for schedule, v in SCHEDULES if plan.pp != 1 else ():
        if (schedule, v) != (plan.schedule, plan.v):
            yield f"{plan.schedule} → {schedule} v={v}", {"schedule": schedule, "v": v}


def _compare(task: Task, best: Prediction, move: str, changes: Mapping[str, Any]) -> Rejected:
    try:
        plan = replace(best.plan, **changes).resolve(task.cluster.num_devices)
    except ShoalError as error:
        return Rejected(move, "", error.problems[0].what)
    if reason := _why_illegal(task, plan):
        return Rejected(move, plan.brief(), reason)
    other = task.predict(plan)
    if not task.fits(other.memory):
        return Rejected(move, plan.brief(), f"does not fit: {why_larger(task, best.memory, other.memory)}")
    change = other.time.total / best.time.total - 1
    if abs(change) < SAME:
        return Rejected(move, plan.brief(), f"as fast ({change:+.1%})")
    if 1 / EQUAL < 1 + change < 1:
        simple = "; also more complex" * (complexity(plan) > complexity(best.plan))
        return Rejected(move, plan.brief(), f"only {-change:.1%} faster, less than predictions can resolve{simple}")
    how = "slower" if change > 0 else "faster"
    return Rejected(move, plan.brief(), f"{how} by {abs(change):.1%}: {cause_of(best, other)}")


def _why_illegal(task: Task, plan: Plan) -> str:
    ranks = (plan.dp_replicate or 1) * (plan.dp_shard or 1)
    if not can_split(task.workload, plan.tp or 1):
        return f"tp={plan.tp} does not divide its heads or features"
    if wrong := check_candidate(task, plan):
        return wrong[0].what
    if task.global_batch % (ranks * (plan.mb or 1)):
        return f"a batch of {task.global_batch} does not divide into {ranks} ranks with microbatches of {plan.mb}"
    return ""


def why_larger(task: Task, best: PeakMemory, other: PeakMemory) -> str:
    """The total beside the limit, and the causes that make a tenth or more of the growth, the largest first."""
    causes = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "logits")
    growth = {cause: getattr(other, cause) - getattr(best, cause) for cause in causes}
    large = sorted((cause for cause in causes if growth[cause] > 0.1 * sum(growth.values())), key=growth.__getitem__)
    listed = ", ".join(f"{cause} {growth[cause] / 2**30:+.1f}" for cause in reversed(large))
    return f"{other.total / 2**30:.1f} of {task.memory_limit / 2**30:.1f} GiB ({listed})"


def cause_of(best: Prediction, other: Prediction) -> str:
    """Name the cause whose time changed most."""
    ours, theirs = best.time.causes(), other.time.causes()
    name = max(ours, key=lambda cause: abs(theirs[cause] - ours[cause]))
    return f"{name} {(theirs[name] - ours[name]) * 1e3:+,.0f} ms"
