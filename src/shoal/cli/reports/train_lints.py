"""Lint the plan of a recipe before its first step: rules whose breaking is predicted to cost much."""

from __future__ import annotations

from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.planner.lint.lint import Lint, lint
from shoal.train.build_model import build_model, without_memory
from shoal.train.recipe.auto_plan import has_dimensions
from shoal.train.recipe.predict_step import task_for

COSTLY = 0.05
"""Of a step: what a rule must cost to be printed."""


def costly_lints(recipe: Recipe, per_node: int) -> list[Lint]:
    """The rules that a resolved plan breaks at such a cost, on this machine and others like it; the worst first, and
    one for each fix. A model whose dimensions are not known has none: to trace it would delay its first step."""
    model = without_memory(lambda: build_model(recipe.model))
    if model is None or not has_dimensions(model):
        return []
    try:
        found = lint(task_for(recipe, model, per_node=per_node), recipe.plan)
    except ShoalError:  # no preset for the machine, or a model without known dimensions
        return []
    costly = [(one.saves.part, one) for one in found if one.saves is not None and one.saves.part > COSTLY]
    worst = sorted(costly, key=lambda pair: pair[0])
    return list(reversed({one.fix: one for _, one in worst}.values()))


def in_one_line(one: Lint) -> str:
    """A lint with its fix as an option of `shoal train`."""
    assert one.saves is not None
    return f'{one.code} {one.title}: {one.numbers}. fix: --plan "{one.saves.plan.brief()}", which {one.saves}'
