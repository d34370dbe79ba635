"""`shoal bench step [RECIPE]`: what each setting buys on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.cli.bench.common import check_alone, check_steps, parse_nproc, progress
from shoal.cli.bench.training import TrainingBench, complete, device_of, note, recipe_mapping
from shoal.cli.overrides import parse
from shoal.cli.reports.bench_step import render
from shoal.config.recipe import Recipe
from shoal.doctor.checks.cores import whole_cores
from shoal.errors import Problem, ShoalError, nearest

KINDS = ("microbatch", "buckets", "recompute", "precision", "compile")


@dataclass(frozen=True, kw_only=True)
class Step(TrainingBench):
    """Measure what each setting buys: microbatch, DDP buckets, recomputation, precision and compilation, one row each,
    against the recipe as it is. All take turns. Ends with the settings to paste that are worth it.

    shoal bench step recipes/tiny.yaml --settings microbatch,recompute
    """

    nproc: str | None = None
    """The number of ranks. None: the recipe's, or 1."""

    settings: str = ",".join(KINDS)
    """The settings to change, with commas between them."""

    steps: int = 30
    """Timed steps of each row, over all rounds."""

    rounds: int = 3
    """Turns of each row."""


def main(arguments: Sequence[str]) -> int:
    """Measure; returns 0."""
    options, reading = parse(Step, arguments, prog="shoal bench step")
    outputs = options.outputs
    numbers = parse_nproc(options.nproc or str(reading.recipe.launch.nproc or 1))
    kinds, problems = _kinds(options.settings)
    problems += [*numbers.problems, *check_alone("step"), *check_steps(options.steps, options.rounds)]
    if len(numbers.nproc) > 1:
        problems.append(Problem("N110", f"--nproc must be one number here, got {options.nproc!r}", "--nproc 2"))
    recipe = complete(reading, [*problems, *outputs.problems()], max(numbers.nproc))
    if recipe.run.planned:
        what = "bench step compares with a plan of the recipe, which plan: auto leaves open"
        raise ShoalError(what, fix="--plan ddp, or another explicit plan", code="N114")
    with outputs.to_stderr():
        found = _measure(options, recipe, numbers.nproc[0], kinds)
    outputs.show(found, render)
    return 0


def _kinds(text: str) -> tuple[tuple[str, ...], list[Problem]]:
    kinds = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    unknown = [word for word in kinds if word not in KINDS]
    problems = [
        Problem("R012", f"unknown setting {word[:80]!r}", nearest(word, KINDS) or ",".join(KINDS)) for word in unknown
    ]
    return kinds, problems if kinds else [Problem("R038", "--settings must not be empty", f"--settings {KINDS[0]}")]


def _measure(options: Step, recipe: Recipe, ranks: int, kinds: tuple[str, ...]) -> dict[str, Any]:
    from shoal.bench.training import step
    from shoal.bench.training.cases import with_settings
    from shoal.bench.training.machine import Machine, cluster_for_bench, cluster_mapping

    machine, device = Machine(), device_of(recipe, [ranks])
    threads = recipe.launch.threads or max(1, whole_cores() // ranks)
    recipe = with_settings(recipe, launch={"nproc": ranks, "threads": threads})
    rows = step.step_rows(recipe, ranks, list(step.changes_of(recipe, ranks, kinds)))

    cluster = cluster_for_bench(options.cluster, ranks=ranks, threads=threads, device=device, say=note)
    with progress(quiet=options.json) as say:
        step.measure_steps(rows, steps=options.steps, rounds=options.rounds, say=say)
        found = step.to_mapping(rows, cluster)
        if (combined := step.together(rows)) is not None:
            again = step.step_rows(recipe, ranks, [combined])
            step.measure_steps(again, steps=options.steps, rounds=options.rounds, say=say)
            found = step.with_together(found, step.to_mapping(again, cluster))
    return {
        "benchmark": "step",
        **recipe_mapping(recipe, options.recipe),
        **machine.to_mapping(),
        **{"plan": recipe.plan.fill(ranks).brief(), "ranks": ranks, "device": device, "threads": threads},
        **{"cores": whole_cores(), "steps": options.steps, "rounds": options.rounds, "warmup_steps": step.WARMUP_STEPS},
        "cluster": cluster_mapping(cluster),
        **found,
    }
