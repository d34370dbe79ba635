"""The one change to a plan that is predicted to save most, for a cause that was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.blueprint.plan import Plan
from shoal.planner.changes.alternatives import single_changes
from shoal.planner.lint.case import WORTH, Case, words
from shoal.planner.search import MODES
from shoal.planner.task import Task

COMPUTE = ("matmul", "attention", "memory_bound", "head", "host")
"""Causes of a predicted step that are computation."""


@dataclass(frozen=True, slots=True)
class NextChange:
    """Another plan, the words in which it differs, and what it is predicted to save."""

    plan: str
    words: str
    instead_of: str
    saved: float
    """Fraction of a step."""

    def __str__(self) -> str:
        before = f" in place of {self.instead_of}" if self.instead_of else ""
        return f'--plan "{self.plan}" ({self.words}{before}): predicted -{self.saved:.0%}'


def next_change(task: Task, plan: Plan, cause: str) -> NextChange | None:
    """The best plan that differs in one change and has less of a cause: `dp`, `tp`, `bubble`, `recompute` or `compute`.

    None: the planner knows none that fits, runs and saves enough.
    """
    case = Case(task, task.predict(plan))
    before = _seconds(case.prediction.time.causes(), cause)

    def has_less(other: Plan) -> bool:
        if cause == "recompute":
            return MODES.index(other.recompute) < MODES.index(plan.recompute)
        return _seconds(task.time(other).causes(), cause) < before

    changes = [change for _, change in single_changes(task, plan)]
    best = next(iter(case.savings(changes, has_less)), None)
    if best is None or best.part < WORTH:
        return None
    return NextChange(best.plan.brief(), words(plan, best.plan), words(best.plan, plan), best.part)


def _seconds(causes: Mapping[str, float], cause: str) -> float:
    return sum(causes[name] for name in (COMPUTE if cause == "compute" else (cause,)) if name in causes)
