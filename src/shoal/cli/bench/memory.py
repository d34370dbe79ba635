"""`shoal bench memory [RECIPE]`: peak memory by cause, measured beside predicted, for several plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.cli.bench.common import check_alone, check_steps, parse_nproc, parse_plans, progress
from shoal.cli.bench.training import PLANS, TrainingBench, complete, device_of, note, recipe_mapping
from shoal.cli.overrides import parse
from shoal.cli.reports.bench_memory import render
from shoal.config.recipe import Recipe
from shoal.doctor.checks.cores import whole_cores


@dataclass(frozen=True, kw_only=True)
class Memory(TrainingBench):
    """Measure the peak memory of a recipe under several plans, on the fullest rank: parameters, gradients, optimizer
    state, and the rest. The prediction stands beside each.

    shoal bench memory recipes/tiny.yaml --plans ddp,zero=3
    """

    nproc: str = "2"
    """Numbers of ranks."""

    plans: str = ",".join(PLANS)
    """Plans with commas between them. `recompute` and the precision of the recipe's plan hold for all."""

    steps: int = 3
    """Steps of each plan, beside three at its start."""


def main(arguments: Sequence[str]) -> int:
    """Measure; returns 0."""
    options, reading = parse(Memory, arguments, prog="shoal bench memory")
    outputs = options.outputs
    numbers, (plans, problems) = parse_nproc(options.nproc), parse_plans(options.plans, PLANS)
    problems += [*numbers.problems, *check_alone("memory"), *check_steps(options.steps, 1)]
    recipe = complete(reading, [*problems, *outputs.problems()], max(numbers.nproc))
    with outputs.to_stderr():
        found = _measure(options, recipe, numbers.nproc, plans)
    outputs.show(found, render)
    return 0


def _measure(options: Memory, recipe: Recipe, nproc: tuple[int, ...], plans: tuple[str, ...]) -> dict[str, Any]:
    from shoal.bench.training.cases import Ranks
    from shoal.bench.training.machine import Machine, cluster_for_bench, cluster_mapping
    from shoal.bench.training.memory import measure_memory, memory_rows, to_mapping

    machine, device = Machine(), device_of(recipe, nproc)
    threads = recipe.launch.threads or max(1, whole_cores() // max(nproc))
    ranks = Ranks(nproc=nproc, threads=threads, cores=whole_cores(), device=device)
    rows = memory_rows(recipe, ranks, plans)
    most = min(max(nproc), max(1, whole_cores() // threads))

    cluster = cluster_for_bench(options.cluster, ranks=most, threads=threads, device=device, say=note)
    with progress(quiet=options.json) as say:
        measure_memory(rows, options.steps, say)
    return {
        "benchmark": "memory",
        **recipe_mapping(recipe, options.recipe),
        **machine.to_mapping(),
        **{"device": device, "threads": threads, "cores": whole_cores(), "steps": options.steps, "rounds": 1},
        "cluster": cluster_mapping(cluster),
        **to_mapping(rows, cluster),
    }
