"""`shoal bench scale [RECIPE]`: strong and weak scaling over the ranks of this machine, or of several hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shoal.cli.bench.common import check_alone, check_steps, parse_nproc, parse_plans, progress
from shoal.cli.bench.on_hosts import Hosts
from shoal.cli.bench.training import PLANS, TrainingBench, complete, device_of, note, recipe_mapping
from shoal.cli.overrides import parse
from shoal.cli.reports.bench_scale import render
from shoal.config.recipe import Recipe
from shoal.doctor.checks.cores import whole_cores
from shoal.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Scale(TrainingBench):
    """Measure how a recipe scales over the ranks of this machine, or of several hosts: the same batch on more ranks
    (strong), and a batch that grows with them (weak). The base is one rank with as many threads and the same
    microbatch. Prediction, memory and loss stand beside each plan. All plans take turns, and warm-up is left out.

    shoal bench scale recipes/tiny.yaml --nproc 1,2 --plans ddp,zero=3,tp=2
    """

    nproc: str | None = None
    """Numbers of ranks on this machine. One rank is always measured, as the base. None: 1,2; with --hosts, those of
    this host."""

    hosts: str | None = None
    """Hosts with their numbers of ranks, this one first: a:8,b:8, or a file. All their ranks are one more number."""

    ssh: str | None = None
    """The command that runs another one on {host}. None: SHOAL_SSH, or ssh. none: `shoal agent` is started there."""

    listen: str | None = None
    """The address of this host at which other hosts connect, and a port: 10.0.0.1:29400. The next port is used too."""

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
    hosts = None if options.hosts is None else Hosts.read(options.hosts, options.ssh, options.listen)
    numbers = parse_nproc(options.nproc or ("1,2" if hosts is None else f"1,{hosts.specs[0].slots}"))
    plans, problems = parse_plans(options.plans, PLANS)
    problems += [*numbers.problems, *check_alone("scale"), *check_steps(options.steps, options.rounds)]
    problems += _without_hosts(options)
    recipe = complete(reading, [*problems, *outputs.problems()], max(numbers.nproc))
    if hosts is not None:
        hosts.check()
    with outputs.to_stderr():
        found = _measure(options, recipe, numbers.nproc, plans, hosts)
    outputs.show(found, render)
    return 0 if all(each["are_equal"] for each in found["losses"]) else 1


def _without_hosts(options: Scale) -> Iterator[Problem]:
    """Find options that have no effect without --hosts."""
    for name in ("ssh", "listen"):
        if options.hosts is None and getattr(options, name) is not None:
            yield Problem("N067", f"--{name} has no effect without --hosts", f"--hosts a:8,b:8, or leave --{name} out")


def _measure(
    options: Scale, recipe: Recipe, nproc: tuple[int, ...], plans: tuple[str, ...], hosts: Hosts | None
) -> dict[str, Any]:
    from shoal.bench.training import scale
    from shoal.bench.training.cases import Ranks
    from shoal.bench.training.machine import CALIBRATION_SECONDS, CalibrationTurns, Machine, cluster_mapping
    from shoal.predict.cluster_parser import parse_cluster

    machine, device = Machine(), device_of(recipe, nproc)
    threads = recipe.launch.threads or max(1, whole_cores() // max(nproc))
    slots = () if hosts is None else tuple(host.slots for host in hosts.specs)
    numbers = tuple(sorted({1, *nproc, *([sum(slots)] if slots else [])}))
    ranks = Ranks(nproc=numbers, threads=threads, cores=whole_cores(), device=device, hosts=slots)
    modes: tuple[scale.Mode, ...] = ("strong", "weak") if options.mode == "both" else (options.mode,)
    request = scale.ScaleRequest(
        ranks=ranks, plans=plans, modes=modes, steps=options.steps, rounds=options.rounds,
        is_anchored=options.cluster is None, on_hosts=None if hosts is None else hosts.measure,
    )  # fmt: skip
    table = scale.table_of(recipe, request)
    most = max((each for each in ranks.nproc if not ranks.shared(each) and not ranks.is_spread(each)), default=1)

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
