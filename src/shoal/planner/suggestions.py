"""Changes to try when no plan fits, and errors for words that no plan can have together.

Fixes are spelled for the command that prints them (`Spelling`), so that each can be appended to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import DEGREES, Plan
from shoal.errors import Problem, ShoalError, listed, raise_if
from shoal.planner.candidates import layouts
from shoal.planner.task import Task


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a command takes the words of a plan and the global batch."""

    word: str
    """A word of a plan, with {name} and {value}."""
    name: str
    """The name of such a word, to leave it out."""
    batch: str
    hyphens: bool = False
    """Whether names have hyphens where a plan has underscores."""

    def say(self, name: str, values: object) -> str:
        """Spell a word with its value, or with several to choose from."""
        return self.word.format(name=self._of(name), value=values)

    def leave_out(self, names: Iterable[str]) -> str:
        """Spell the fix to drop one of these words."""
        return f"leave out {listed(self.name.format(name=self._of(name)) for name in names)}"

    def _of(self, name: str) -> str:
        return name.replace("_", "-") if self.hyphens else name


IN_A_PLAN = Spelling("{name}={value}", "{name}", "--data.global_batch")
"""For `shoal train --plan "..."`."""
AS_OPTIONS = Spelling("--{name} {value}", "--{name}", "--global-batch", hyphens=True)
"""For `shoal plan`."""


def reject_contradictions(task: Task, required: Plan, spelling: Spelling = IN_A_PLAN) -> None:
    """Raise if no layout has all required words; name the legal values of each."""
    found = list(layouts(task, required))
    shares = sorted({task.global_batch // (one["dp_shard"] * one["dp_replicate"]) for one in found})
    if required.mb is not None and found and not any(share % required.mb == 0 for share in shares):
        sizes = sorted({size for share in shares for size in divisors(share)})
        what = f"mb={required.mb} divides no rank's share of {task.global_batch} samples"
        raise ShoalError(what, fix=spelling.say("mb", listed(sizes)), code="Q007")
    if found:
        return
    model, given = task.workload.name, _degrees_of(required)
    raise_if(check_axes(task, required, spelling), title="nothing to plan" if len(given) > 1 else "")
    possible = any(True for _ in layouts(task, Plan(precision=required.precision)))
    if len(given) > 1 and possible:
        words = " ".join(f"{axis}={value}" for axis, value in given.items())
        free_of = [axis for axis in given if any(True for _ in layouts(task, Plan.of(_without(required, axis))))]
        raise ShoalError(
            f"no plan for {model} on {task.cluster} has all of {words}, with {task.global_batch} samples a step",
            fix=spelling.leave_out(free_of or given),
            code="Q009",
        )
    devices = task.cluster.num_devices
    near = devices * max(1, round(task.global_batch / devices))
    what = f"no layout of {devices} devices divides a global batch of {task.global_batch} samples and {model}"
    raise ShoalError(what, fix=f"{spelling.batch} {near}", code="Q010")


def check_axes(task: Task, required: Plan, spelling: Spelling) -> Iterator[Problem]:
    """Yield each required degree that no layout has, whatever the other degrees are."""
    possible, given = list(layouts(task, Plan(precision=required.precision))), _degrees_of(required)
    legal = {axis: sorted({layout[axis] for layout in possible}) for axis in given}
    for axis, value in given.items():
        if legal[axis] and value not in legal[axis]:
            what = f"no plan for {task.workload.name} on {task.cluster} has {axis}={value}"
            why = dict(task.workload.left_out).get(axis)
            what += f": it {why}" if why and value > 1 else ""
            yield Problem("Q008", what, spelling.say(axis, listed(legal[axis])))


def _degrees_of(required: Plan) -> dict[str, int]:
    return {axis: getattr(required, axis) for axis in (*DEGREES, "zero") if getattr(required, axis) is not None}


def _without(plan: Plan, axis: str) -> dict[str, Any]:
    return {name: value for name, value in plan.to_mapping().items() if name != axis}


def smallest_changes(task: Task, required: Plan) -> Iterator[dict[str, Any]]:
    """Yield changes that may reduce memory, the cheapest first. The command tries each of them."""
    if task.profile.moments > 4:
        yield {"state_dtype": "bf16"}
    if required.offload == "none" and not task.cluster.device.is_host:
        yield {"offload": "optimizer"}
    for shorter in (task.sequence // 2, task.sequence // 4):
        if task.workload.is_transformer and shorter >= 512:
            yield {"seq_len": shorter}
