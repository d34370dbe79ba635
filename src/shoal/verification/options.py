"""Options of a verification and their problems. Nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.check import check_ranks
from shoal.config.checks.arguments import check_number, check_whole
from shoal.config.recipe import Recipe
from shoal.errors import Problem, ShoalError
from shoal.safe_parsing import short

STEPS = 3
TOLERANCES = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""Precision → the largest relative difference that counts as rounding. In float64 the difference of a wrong layout is
about 1e-2 and that of a right one 1e-13, so 1e-10 separates them. In lower precision, sums in another order differ by
the rounding of the precision, amplified by the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifySettings:
    """Options of every verification; `verify` explains them."""

    steps: int = STEPS
    precision: str | None = None
    tolerance: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSettings(VerifySettings):
    """Options of the verification of a recipe."""

    real: bool = False
    """Verify the recipe's own model and data, not a small copy."""


def check_options(settings: VerifySettings) -> list[Problem]:
    """Find all options that are out of range."""
    return [
        *_check_steps(settings.steps),
        *_check_tolerance(settings.tolerance),
        *check_verified_precision(settings.precision),
    ]


def check_verified_recipe(recipe: Recipe, world_size: int, settings: RecipeSettings) -> list[Problem]:
    """Find the problems of a verification that can be found without its model and its data."""
    found = check_options(settings)
    if recipe.optim.param_dtype == "bf16":
        what = "optim.param_dtype must be fp32 for shoal verify, got bf16, which rounds weights at random"
        found += [Problem("V003", what, "--optim.param_dtype fp32, which computes gradients with the same code")]
    return [*found, *check_ranks(recipe.plan, world_size, batch=recipe.data.global_batch)]


def claimed_ranks(plan: Plan) -> int:
    """The product of the plan's degrees."""
    degrees = (plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp, plan.pp)
    if not any(degrees):
        what = f"the plan must have a degree, or nproc must be set, got plan '{plan}'"
        raise ShoalError(what, fix="verify(..., nproc=4), or a plan such as tp=2", code="V004")
    return math.prod(degree or 1 for degree in degrees)


def check_verified_precision(precision: str | None) -> Iterator[Problem]:
    """The problem of a precision that has no tolerance. None: the plan's, or float64."""
    if precision is not None and not (isinstance(precision, str) and precision in TOLERANCES):
        known = ", ".join(TOLERANCES)
        yield Problem("R050", f"precision must be one of {known}, got {short(precision)}", "--precision fp64")


def _check_tolerance(tolerance: float | None) -> Iterator[Problem]:
    if tolerance is not None and any(check_number("tolerance", tolerance, least=0, usual=0)):
        yield Problem("V001", f"tolerance must be a number of at least 0, got {short(tolerance)}", "--tolerance 1e-10")


def _check_steps(steps: int) -> Iterator[Problem]:
    if any(check_whole("steps", steps, least=1, usual=STEPS)):
        what = f"steps must be a whole number of at least 1, got {short(steps)}"
        yield Problem("V002", what, f"--steps {STEPS}")
