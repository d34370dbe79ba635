"""Find packages that a recipe needs and this machine lacks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from shoal.config.recipe import Recipe
from shoal.errors import Problem, ShoalError, needs, to_install


def check_packages(recipe: Recipe) -> Iterator[Problem]:
    """Find missing packages of trackers and of rowwise fp8."""
    for tracker in recipe.run.trackers:
        try:
            needs(tracker, what=f"the tracker {tracker}", extra=tracker)
        except ShoalError as error:
            yield from error.problems
    if recipe.plan.precision == "fp8" and recipe.run.fp8 == "rowwise":
        yield from _check_torchao()


def _check_torchao() -> Iterator[Problem]:
    """Find torchao without importing it: the import takes seconds and prints warnings."""
    if importlib.util.find_spec("torchao") is None:
        what = "rowwise fp8 needs the package torchao, which is not installed"
        yield Problem("R027", what, f"{to_install('fp8')}, or --run.fp8 tensorwise")
