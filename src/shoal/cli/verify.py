"""`shoal verify [RECIPE]`: check that a plan computes the same numbers as one process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import tyro

from shoal.cli.overrides import parse
from shoal.cli.reports.console import show
from shoal.comm.rendezvous.launcher_environment import read_environment
from shoal.config.recipe import Recipe
from shoal.errors import Problem, ShoalError
from shoal.verification.options import RecipeSettings, check_options, check_verified_recipe, claimed_ranks

if TYPE_CHECKING:
    from shoal.verification.report import VerifyResult


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Train a few steps in one process and with the plan, from the same weights. Compare the loss, the gradient norm,
    every gradient and every weight by name; compare communicated bytes and memory with the prediction. Exit code 0:
    equal, 1: not.

    shoal verify --nproc 4 --plan "tp=2 pp=2 zero=1 1f1b mb=1"
    """

    recipe: Annotated[Path | None, tyro.conf.Positional] = None
    """A YAML file. None: the tiny llama."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""

    html: Path | None = None
    """Write a page as well: the difference of every tensor, communication, memory, and the layout."""

    matrix: bool = False
    """Verify every valid layout of --nproc ranks instead of the recipe's plan."""

    real: bool = False
    """Verify the model at full size on the recipe's data instead of a small copy on random tokens."""

    steps: int = 3
    """Number of optimizer steps to compare."""

    precision: str | None = None
    """fp64, fp32, bf16 or fp16. None: fp64 on the CPU, the plan's own on a GPU."""

    tolerance: float | None = None
    """The largest relative difference that passes. None: 1e-10 in fp64, 1e-4 in fp32, 5e-2 below."""


def main(arguments: Sequence[str]) -> int:
    """Verify; 0 when all values are equal, 1 when one is not."""
    options, reading = parse(Verify, arguments, prog="shoal verify")
    for note in reading.notes:
        print(f"shoal: {note}", file=sys.stderr)
    reading = reading.with_problems(_check_launcher_and_plan(options, arguments))
    out = sys.stdout
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        recipe = reading.complete(lambda each: _check(options, each))
        return _matrix(options, recipe, out) if options.matrix else _one(options, recipe, out)


def _check_launcher_and_plan(options: Verify, arguments: Sequence[str]) -> Iterator[Problem]:
    place = read_environment(os.environ)
    if place is not None and place.world_size > 1:
        yield Problem(
            "R033",
            f"verify must be started as one process, got {place.world_size} from {place.source}",
            f"shoal verify --nproc {place.world_size} ..., without {place.source}",
        )
    if options.matrix and any(word.startswith("--plan") for word in arguments):
        yield Problem("R044", "--matrix verifies every valid plan and takes no --plan", "shoal verify --matrix")
    if options.matrix and options.html is not None:
        yield Problem("R072", "--html shows one plan, and --matrix verifies every valid one", "shoal verify --matrix")


def _check(options: Verify, recipe: Recipe) -> list[Problem]:
    """All problems of a recipe of which some values could not be read."""
    if options.matrix:
        return check_options(_settings(options))
    return check_verified_recipe(recipe, _claimed_ranks(recipe) or 1, _settings(options))


def _one(options: Verify, recipe: Recipe, out: TextIO) -> int:

    from shoal.verification.api import verify_case
    from shoal.verification.recipe.cases import case_of
    from shoal.verification.report import render, to_mapping

    case = case_of(recipe, _num_ranks(recipe), _settings(options))
    result = verify_case(case)
    if options.html is not None:
        _write_page(options.html, result)
    if options.json:
        print(json.dumps(to_mapping(result)), file=out)
    else:
        show(lambda console: render(console, result), out)
    return 0 if result.equal else 1


def _write_page(path: Path, result: VerifyResult) -> None:
    from shoal.pages.report import write_page
    from shoal.pages.verify.page import TensorError, verify_page
    from shoal.verification.report import to_mapping

    tensors = [TensorError(*each) for each in result.tensors]
    write_page(path, verify_page(to_mapping(result), tensors), "--html")


def _matrix(options: Verify, recipe: Recipe, out: TextIO) -> int:
    from rich.console import Console

    from shoal.verification.api import verify_case
    from shoal.verification.recipe.cases import legal_cases
    from shoal.verification.report import matrix_row, matrix_table, to_mapping

    console = Console(file=sys.stderr)
    results = []
    cases = list(legal_cases(recipe, _num_ranks(recipe), _settings(options)))
    if not cases:
        what = f"no layout of {_num_ranks(recipe)} ranks is valid for this model and batch, so nothing was verified"
        raise ShoalError(what, fix="--nproc 2", code="V006")
    for number, case in enumerate(cases, 1):
        results.append(verify_case(case))
        console.print(f"{number}/{len(cases)}  {matrix_row(results[-1])}", highlight=False)
    are_equal = all(result.verdict.equal for result in results)
    if options.json:
        print(json.dumps({"equal": are_equal, "results": [to_mapping(result) for result in results]}), file=out)
    else:
        show(lambda console: console.print(matrix_table(results)), out)
    return 0 if are_equal else 1


def _settings(options: Verify) -> RecipeSettings:
    return RecipeSettings(
        real=options.real, steps=options.steps, precision=options.precision, tolerance=options.tolerance
    )


def _num_ranks(recipe: Recipe) -> int:
    """`launch.nproc`, else the product of the plan's degrees, else one rank for each GPU."""
    from shoal.launch.local import default_nproc

    return _claimed_ranks(recipe) or default_nproc(recipe.launch.device)


def _claimed_ranks(recipe: Recipe) -> int | None:
    """`launch.nproc`, else the product of the plan's degrees; None: neither is set."""
    plan = recipe.plan
    if recipe.launch.nproc is None and any((plan.dp_replicate, plan.dp_shard, plan.tp, plan.pp, plan.cp)):
        return claimed_ranks(plan)
    return recipe.launch.nproc
