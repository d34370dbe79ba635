"""Explain a plan: the moves from one device to it, the laws of scaling, and rules of thumb."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.blueprint.plan import DEGREES, Plan
from shoal.errors import ShoalError
from shoal.planner.candidates import check_candidate
from shoal.planner.task import Task
from shoal.predict.predict import Prediction

UNLIMITED = 1e30
"""Bytes of memory, where only the time of a plan is predicted."""


@dataclass(frozen=True, slots=True)
class Move:
    """One change on the way to the plan, and its effect."""

    name: str
    plan: str
    gib: float
    seconds: float
    fits: bool
    note: str = ""

    def to_mapping(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "move": self.name,
            "plan": self.plan,
            "memory_gib": None if math.isnan(self.gib) else round(self.gib, 2),
            "step_s": None if math.isnan(self.seconds) else round(self.seconds, 4),
            "fits": self.fits,
            "note": self.note,
        }


def moves(task: Task, best: Plan) -> list[Move]:
    """Return the moves from one device to the plan, each compared with the one before it. A plan that cannot run is
    listed with the reason, and the next move still starts from it."""
    alone = replace(task, cluster=task.cluster.resized(1))
    start = Plan(mb=1, precision=best.precision).resolve(1)
    found = [_move(alone, "one device", start, None)]
    for name, plan in _way(best, task.cluster.num_devices):
        before = found[-1]
        try:
            found.append(_move(task, name, plan.resolve(task.cluster.num_devices), before))
        except ShoalError as error:
            found.append(Move(name, str(plan), math.nan, math.nan, False, error.problems[0].what))
    return found


def _way(best: Plan, num_devices: int) -> Iterator[tuple[str, Plan]]:
    """Add the words of the plan a few at a time, in the usual order."""
    plan = Plan(mb=1, precision=best.precision, zero=0)
    if num_devices > 1:
        yield "copies on all devices", plan
    steps: list[tuple[str, dict[str, Any]]] = []
    if best.tp != 1:
        steps.append((f"layers split over {best.tp}", {"tp": best.tp, "sp": best.sp}))
    if best.pp != 1:
        steps.append((f"a pipeline of {best.pp}", {"pp": best.pp}))
    if best.cp != 1:
        steps.append((f"sequences divided by {best.cp}", {"cp": best.cp, "context": best.context}))
    if best.zero:
        what = {1: "optimizer states", 2: "and gradients", 3: "gradients and parameters"}[best.zero]
        steps.append(
            (f"{what} shared", {"zero": best.zero, "dp_shard": best.dp_shard, "dp_replicate": best.dp_replicate})
        )
    if best.ep != 1:
        steps.append((f"experts divided by {best.ep}", {"ep": best.ep}))
    if best.recompute != "none":
        steps.append((f"recompute={best.recompute}", {"recompute": best.recompute}))
    if best.mb != 1:
        steps.append((f"microbatches of {best.mb}", {"mb": best.mb}))
    if best.pp != 1 and best.schedule != "1f1b":
        steps.append((f"{best.schedule}", {"schedule": best.schedule, "v": best.v}))
    if best.offload != "none":
        steps.append((f"offload={best.offload}", {"offload": best.offload}))
    for name, changes in steps:
        plan = replace(plan, **changes)
        yield name, plan


def _move(task: Task, name: str, plan: Plan, before: Move | None) -> Move:
    prediction = task.predict(plan)
    note = ""
    ranks = (plan.dp_replicate or 1) * (plan.dp_shard or 1)
    if ranks > task.global_batch:
        note = f"a batch of {task.global_batch} has no sample for each of {ranks} ranks"
    elif wrong := check_candidate(task, plan):
        note = wrong[0].what
    fits = task.fits(prediction.memory) and not note
    gib = prediction.memory.total / 2**30
    if not note and before is not None and not math.isnan(before.gib):
        note = f"{gib - before.gib:+.1f} GiB, {_times(prediction.time.total, before.seconds)}"
    return Move(name, plan.brief(), gib, prediction.time.total, fits, note)


def _times(now: float, before: float) -> str:
    """Format the change of a time: a factor for large gains, else a percentage."""
    if now < before / 1.5:
        return f"{before / now:,.1f} times as fast"
    return f"{now / before - 1:+.1%} time"


# ---- laws -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Laws:
    """Amdahl's law and the alpha-beta model of messages, for one plan."""

    serial_part: float
    """The part of a step on one device that would not get faster, by which Amdahl's law gives this plan's time."""
    limit: float
    """How many times as fast as one device infinitely many would be by that law."""
    message: float
    """Bytes of the largest message of data parallelism, on its way to every rank."""
    latency: float
    """Seconds of it that do not depend on its size: alpha."""
    transfer: float
    """Seconds of it that do: beta times M."""


def laws(task: Task, best: Prediction) -> Laws:
    """Compare the plan's time with that of one device, as if that had the memory."""
    alone = replace(task, cluster=task.cluster.resized(1), max_memory=UNLIMITED)
    plan, count = best.plan, task.cluster.num_devices
    one = alone.time(Plan(mb=plan.mb, precision=plan.precision, recompute=plan.recompute).resolve(1)).total
    part = 0.0 if count == 1 else max(0.0, (best.time.total * count / one - 1) / (count - 1))
    shards = (plan.dp_shard or 1) * (plan.cp or 1) if plan.zero else (plan.dp_replicate or 1) * (plan.cp or 1)
    link = task.cluster.link(shards, plan.tp or 1)
    held = task.workload.parameters / ((plan.tp or 1) * (plan.pp or 1)) * task.profile.reduce
    latency = link.latency_of_gather()
    return Laws(part, math.inf if part == 0 else 1 / part, held, latency, link.gather(held) - latency)


@dataclass(frozen=True, slots=True)
class Scale:
    """The same plan on another number of devices."""

    devices: int
    seconds: float
    efficiency: float
    """Tokens/s/device, relative to the smallest number of devices that can run it."""


def scaling(task: Task, plan: Plan) -> list[Scale]:
    """Return one model copy, two, four, ... up to all devices, with the same global batch and microbatches, where it
    fits."""
    unit = (plan.tp or 1) * (plan.pp or 1) * (plan.cp or 1)
    is_hybrid = (plan.dp_replicate or 1) > 1 and (plan.dp_shard or 1) > 1
    unit *= (plan.dp_shard or 1) if is_hybrid else 1
    most = task.cluster.num_devices
    sizes = [unit * 2**n for n in range((most // unit).bit_length()) if unit * 2**n < most]
    scales: list[Scale] = []
    for devices in (*sizes, most):
        axis = "dp_shard" if plan.zero and not is_hybrid else "dp_replicate"
        try:
            there = replace(task, cluster=task.cluster.resized(devices))
        except ShoalError:  # it does not fill nodes
            continue
        same = replace(plan, **{axis: devices // unit})
        if not there.fits(there.memory(same)):
            continue
        seconds = there.time(same).total
        first = scales[0] if scales else None
        efficiency = 1.0 if first is None else first.seconds * first.devices / (seconds * devices)
        scales.append(Scale(devices, seconds, efficiency))
    return scales


# ---- rules of thumb -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RuleOfThumb:
    """A well-known rule, and whether the plan follows it."""

    rule: str
    agrees: bool
    why: str


def rules_of_thumb(task: Task, best: Prediction, given: Mapping[str, Any] | None = None) -> list[RuleOfThumb]:
    """Return the rules that apply to this task. Where a rule is not followed, `given` words are the reason, if any."""
    limits = [f"{axis}={given[axis]}" for axis in (*DEGREES, "zero") if given and given.get(axis) is not None]
    found = _rules_of_thumb(task, best)
    if not limits:
        return found
    return [one if one.agrees else replace(one, why=f"plans were limited to {' '.join(limits)}") for one in found]


def _rules_of_thumb(task: Task, best: Prediction) -> list[RuleOfThumb]:
    plan, size = best.plan, task.workload.parameters
    alone = replace(task, cluster=task.cluster.resized(1))
    fits_alone = alone.fits(alone.memory(Plan(mb=1, precision=plan.precision).resolve(1)))
    rules: list[RuleOfThumb] = []
    several = task.cluster.num_devices > 1
    is_plain = plan.tp == plan.pp == plan.cp == plan.ep == 1
    if several and fits_alone:
        why = (
            ""
            if is_plain and not plan.zero
            else f"zero={plan.zero} has room for mb={plan.mb}"
            if is_plain
            else "faster"
        )
        rules.append(RuleOfThumb("what fits on one device is copied (DDP)", is_plain and plan.zero == 0, why))
    elif several and size <= 10e9:
        why = "" if is_plain and plan.zero else f"predicted faster: {plan.brief()}"
        rules.append(RuleOfThumb("1 to 10 B parameters are sharded (FSDP)", is_plain and bool(plan.zero), why))
    elif several:
        composed = plan.tp != 1 or plan.pp != 1
        why = "" if composed else "sharding alone hides behind computing here"
        rules.append(RuleOfThumb("more than 10 B parameters are divided along several axes (3D)", composed, why))
    if (plan.tp or 1) > 1:
        inside = (plan.tp or 1) <= task.cluster.per_node
        rules.append(
            RuleOfThumb("tensor parallelism stays inside a node", inside, "" if inside else "nothing else fits")
        )
    if task.sequence >= 32768 and several:
        divided = plan.cp != 1
        rules.append(RuleOfThumb("long sequences are divided (cp)", divided, "" if divided else "they fit without"))
    if task.workload.experts and several:
        divided = plan.ep != 1
        rules.append(
            RuleOfThumb("experts are divided (ep)", divided, "" if divided else "they travel less where they are whole")
        )
    return rules
