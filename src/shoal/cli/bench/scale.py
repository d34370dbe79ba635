"""`shoal bench scale [RECIPE]`: strong and weak scaling over the ranks of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shoal.cli.bench.common import check_alone, check_steps, parse_nproc, parse_plans, progress
from shoal.cli.bench.training import PLANS, TrainingBench, complete, device_of, note, recipe_mapping
from shoal.cli.overrides import parse
from shoal.cli.reports.bench_scale import render
from shoal.config.recipe import Recipe
from shoal.doctor.checks.cores import whole_cores


@dataclass(frozen=True, kw_only=True)
class Scale(TrainingBench):
    """Measure how a recipe scales over the ranks of this machine: the same batch on more ranks (strong), and a batch
    that grows with them (weak). The base is one rank with as many threads and the same microbatch. Prediction, memory
    and loss stand beside each plan. All plans take turns, and warm-up is left out.

    shoal bench scale recipes/tiny.yaml --nproc 1,2 --plans ddp,zero=3,tp=2
    """

    nproc: str = "1,2"
    """Numbers of ranks. One rank is always measured, as the base."""

    plans: str = ",".join(PLANS)
    """Plans with commas between them. `recompute` and the precision of the recipe's plan hold for all."""

    mode: Literal["strong", "weak", "both"] = "both"
    """strong: the recipe's global batch on every number of ranks. weak: it grows from one rank's share."""

    steps: int = 30
    """Timed steps of each row, over all rounds."""

    rounds: int = 3
    """Turns of each row."""


def main(arguments: Sequence[str]) -> int:
    """Measure; returns 0, or 1 if plans have different losses."""
    options, reading = parse(Scale, arguments, prog="shoal bench scale")
    outputs = options.outputs
    numbers, (plans, problems) = parse_nproc(options.nproc), parse_plans(options.plans, PLANS)
    problems += [*numbers.problems, *check_alone("scale"), *check_steps(options.steps, options.rounds)]
    recipe = complete(reading, [*problems, *outputs.problems()], max(numbers.nproc))
    with outputs.to_stderr():
        found = _measure(options, recipe, numbers.nproc, plans)
    outputs.show(found, render)
    return 0 if all(each["are_equal"] for each in found["losses"]) else 1


def _measure(options: Scale, recipe: Recipe, nproc: tuple[int, ...], plans: tuple[str, ...]) -> dict[str, Any]:
    from shoal.bench.training import scale
    from shoal.bench.training.cases import Ranks
    from shoal.bench.training.machine import CALIBRATION_SECONDS, CalibrationTurns, Machine, cluster_mapping
    from shoal.predict.cluster_parser import parse_cluster

    machine, device = Machine(), device_of(recipe, nproc)
    threads = recipe.launch.threads or max(1, whole_cores() // max(nproc))
    ranks = Ranks(nproc=tuple(sorted({1, *nproc})), threads=threads, cores=whole_cores(), device=device)
    modes: tuple[scale.Mode, ...] = ("strong", "weak") if options.mode == "both" else (options.mode,)
    request = scale.ScaleRequest(
        ranks=ranks, plans=plans, modes=modes, steps=options.steps, rounds=options.rounds,
        is_anchored=options.cluster is None,
    )  # fmt: skip
    table = scale.table_of(recipe, request)
    most = max((each for each in ranks.nproc if not ranks.shared(each)), default=1)

    if options.cluster is not None:
        turns = CalibrationTurns.named(parse_cluster(options.cluster), options.rounds)
    else:
        note(f"this machine is measured in every round, {CALIBRATION_SECONDS:.0f} s in all; --cluster names another")
        turns = CalibrationTurns(most, threads, device, recipe.plan.precision, options.rounds)
    with progress(quiet=options.json) as say:
        scale.measure_scale(table, say, turns)
    return {
        "benchmark": "scale",
        **recipe_mapping(recipe, options.recipe),
        **machine.to_mapping(),
        "cluster": cluster_mapping(turns.clusters[0]),
        **scale.to_mapping(table, turns.clusters),
    }
