"""Suggest options of `shoal plan` when no plan fits. Each is tried before it is suggested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

from shoal.blueprint.plan import Plan
from shoal.errors import ShoalError
from shoal.planner.request import PlanRequest
from shoal.planner.search import search
from shoal.planner.suggestions import smallest_changes
from shoal.planner.task import Task
from shoal.predict.cluster_parser import larger
from shoal.predict.predict import Prediction

DOUBLINGS = 14
"""How often the cluster is doubled, at most."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Options to add and to drop, and the best plan that then fits."""

    add: dict[str, Any]
    drop: tuple[str, ...]
    best: Prediction

    @property
    def flags(self) -> str:
        """The options to add to the command."""
        words = (
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in self.add.items()
        )
        return " ".join(words)

    def __str__(self) -> str:
        without = f"without {' '.join(f'--{name}'.replace('_', '-') for name in self.drop)}" if self.drop else ""
        how = ", and ".join(part for part in (without, self.flags) if part)
        return f"{how}: {self.best.plan.brief()} takes {self.best.memory.total / 2**30:.1f} GiB"


def suggestions(request: PlanRequest, task: Task, required: dict[str, Any], *, is_rejected: bool) -> list[Suggestion]:
    """Return all single changes with which a plan fits, the cheapest first."""
    changes = _changes(request, task, required, is_rejected)
    found = [one for change in changes if (one := _tried(request, task, *change))]
    if found and is_rejected:
        return found
    names = islice(larger(request.cluster), DOUBLINGS)
    bigger = (_tried(request, task, {"cluster": name}, _layout_words(request)) for name in names)
    return [*found, *islice(filter(None, bigger), 1)]


def _changes(
    request: PlanRequest, task: Task, required: dict[str, Any], is_rejected: bool
) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    for change in smallest_changes(task, Plan.of(required)):
        yield change, ()
    if is_rejected and not request.eager:
        yield {"eager": True}, ()
    if is_rejected and request.schedule is not None:
        yield {}, ("schedule", "v") if request.v is not None else ("schedule",)
    if limits := request.limits():
        yield {}, limits


def _layout_words(request: PlanRequest) -> tuple[str, ...]:
    """Return the options that a larger cluster may contradict."""
    return tuple(name for name in request.limits() if name not in ("recompute", "offload"))


def _tried(request: PlanRequest, task: Task, add: dict[str, Any], drop: tuple[str, ...]) -> Suggestion | None:
    """Return the change if a plan then fits. The global batch stays the same, unless the cluster has more devices than
    samples: then it grows."""
    changed = replace(request, **{name: _default(request, name) for name in drop})
    if "plan" in drop and (precision := request.required()["precision"]) != changed.required()["precision"]:
        add = {**add, "precision": precision}
    changed = replace(changed, **add)
    try:
        there = changed.task()
        batch = max(task.global_batch, there.cluster.num_devices)
        if there.global_batch != batch:
            add, changed = {**add, "global_batch": batch}, replace(changed, global_batch=batch)
            there = changed.task()
        best = search(there, changed.required(), keep=1).best
    except ShoalError:  # words that exclude each other
        return None
    return Suggestion(add, drop, best[0]) if best else None


def _default(request: PlanRequest, name: str) -> Any:
    return next(entry.default for entry in fields(request) if entry.name == name)
