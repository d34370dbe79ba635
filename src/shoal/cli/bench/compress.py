"""`shoal bench compress [RECIPE]`: compare gradient compression and local SGD on one model and one link."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from shoal.cli.overrides import parse
from shoal.cli.reports.console import WIDTH, show
from shoal.comm.rendezvous.launcher_environment import Placement, read_environment
from shoal.config.checks.settings import check_incomplete
from shoal.config.recipe import Recipe
from shoal.errors import Findings, Problem, ShoalError, raise_if

if TYPE_CHECKING:
    from shoal.bench.compress import CompressRequest, CompressTrials, Trial
    from shoal.train.recipe.preflight import Job

DEFAULT_NPROC = 2
PLAIN = "plain"
"""The name of uncompressed gradients at every step, for which a plan has no word."""


@dataclass(frozen=True, kw_only=True)
class Compress:
    """Train a recipe for some steps with every gradient compression and local SGD setting. Report the bytes, the
    predicted and measured step time, and the loss. Starts its own ranks; under torchrun, srun or mpirun on several
    hosts, it is one of the ranks and measures the link between the hosts.

    shoal bench compress recipes/tiny.yaml --steps 100 --methods compress=int8 "sync=diloco:50 compress=int8"
    """

    recipe: Annotated[Path | None, tyro.conf.Positional] = None
    """A YAML file. None: the tiny llama."""

    methods: tuple[str, ...] = ()
    """Words of a plan, in quotes if there are several. `plain`, uncompressed gradients at every step, is always the
    first, as the baseline. None: all methods."""

    steps: int = 50
    """Steps of each method; with local SGD, rounded up to a multiple of its interval."""

    until_loss: float | None = None
    """End a method when its loss has reached this value, and report the time."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Measure all methods; returns 0."""
    options, reading = parse(Compress, arguments, prog="shoal bench compress")
    wrong = Findings()
    methods = wrong.of(_methods, options.methods)
    if options.steps < 2:
        what = f"--steps must be 2 or more, since the first is not timed, got {options.steps}"
        wrong += [Problem("R036", what, "--steps 20")]
    place = read_environment(os.environ)
    for note in reading.notes if place is None or place.rank == 0 else ():
        print(f"shoal: {note}", file=sys.stderr)

    def num_ranks(recipe: Recipe) -> int:
        return place.world_size if place is not None else recipe.launch.nproc or DEFAULT_NPROC

    def check(recipe: Recipe) -> list[Problem]:
        return check_incomplete(recipe, num_ranks(recipe), tries_other_syncs=True)

    recipe = reading.with_problems(wrong.problems).complete(check)
    ranks = num_ranks(recipe)
    assert methods is not None

    from shoal.bench.compress import EVERY, CompressRequest
    from shoal.blueprint.validation.unsupported import check_unsupported
    from shoal.predict.estimate.replica_sync import sync_traffic
    from shoal.train.recipe.preflight import preflight

    job = preflight(recipe, ranks, tries_other_syncs=True)
    plan = job.recipe.plan
    if plan.layout.dp_replicate < 2:
        fix = "--nproc 2" if ranks == 1 else "--plan.dp_replicate 2, with enough ranks for two replicas"
        raise ShoalError(f"the plan must have two or more replicas, got {plan.brief()!r}", fix=fix, code="R041")
    raise_if(dict.fromkeys(found for words in methods for found in check_unsupported(sync_traffic(plan, words))))
    request = CompressRequest(methods=methods or EVERY, steps=options.steps, until=options.until_loss)
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        found = _measured(place, ranks, job, request)
    if not found.is_main:
        return 0
    if options.json:
        print(json.dumps(to_mapping(found)), file=out)
    else:
        show(lambda console: render(console, found), out, width=WIDTH)
    return 0


def _methods(methods: Sequence[str]) -> tuple[str, ...]:
    """The methods as words of a plan, the baseline first; empty: all."""
    from shoal.blueprint.plan import Plan

    chosen = ["" if words == PLAIN else words for words in methods]
    for words in chosen:
        plan = Plan.parse(words)
        if set(plan.to_mapping()) - {"compress", "sync"} or plan.sync == "auto":
            got = "sync=auto" if plan.sync == "auto" else "other words"
            raise ShoalError(
                f"--methods must have compress= and sync= alone, got {got} in {words!r}",
                fix='--methods "sync=diloco:50 compress=int8", and other words in --plan',
                code="R042",
            )
    return tuple(dict.fromkeys(["", *chosen])) if chosen else ()


def _measured(place: Placement | None, ranks: int, job: Job, request: CompressRequest) -> CompressTrials:
    from shoal.bench.compress import measure
    from shoal.launch.local import launch

    return measure(place, None, job, request) if place is not None else launch(measure, (job, request), nproc=ranks)[0]


def to_mapping(found: CompressTrials) -> dict[str, Any]:
    """The result as JSON; times in seconds."""
    link, replica, plain = found.estimate.link, found.estimate.replica, found.plain
    return {
        "replicas": found.replicas,
        "parameters": replica.size,
        "compute_seconds": replica.compute,
        "link": {"latency_seconds": link.latency, "bytes_per_second": link.bandwidth},
        "codec_seconds_per_element": found.estimate.codec,
        "chosen": found.estimate.chosen.words or PLAIN,
        "why": found.estimate.why,
        "methods": [
            {
                **{name: value for name, value in asdict(trial).items() if name != "words"},
                "method": trial.words or PLAIN,
                "speedup": plain.seconds / trial.seconds,
                "eval_loss_ratio": _loss_ratio(trial, plain),
            }
            for trial in found.trials
        ],
    }


def render(console: Console, found: CompressTrials) -> None:
    """Print the table of methods and the measured link."""
    link, replica = found.estimate.link, found.estimate.replica
    table = Table(title=f"{found.replicas} replicas of {replica.size:,} parameters")
    for name in (
        "method",
        "sent a step, counted",
        "step, predicted",
        "measured",
        "speedup",
        "loss",
        "validation loss",
        "ratio to plain",
    ):
        table.add_column(name, justify="left" if name == "method" else "right")
    for trial in found.trials:
        table.add_row(*_row(trial, found.plain, is_chosen=trial.words == found.estimate.chosen.words))
    console.print(table)
    console.print(
        f"measured: {replica.compute:.3f} s a step without communication; the link carries"
        f" {link.bandwidth * 8 / 1e6:,.1f} Mbit/s from each rank, {link.latency * 1e3:.2f} ms a collective"
    )
    console.print(f"chosen (*): {found.estimate.chosen.name}: {found.estimate.why}")


def _loss_ratio(trial: Trial, plain: Trial) -> float | None:
    """The validation loss divided by the baseline's; None: there are no validation samples."""
    return trial.eval_loss / plain.eval_loss if trial.eval_loss is not None and plain.eval_loss else None


def _row(trial: Trial, plain: Trial, *, is_chosen: bool) -> list[str]:
    of_plain = _loss_ratio(trial, plain)
    reached = f" in {trial.seconds_to_loss:.1f} s" if trial.seconds_to_loss is not None else ""
    return [
        f"{'* ' * is_chosen}{trial.words or PLAIN}",
        f"{trial.bytes / 1e6:,.3f} MB",
        f"{trial.predicted:.3f} s",
        f"{trial.seconds:.3f} s",
        f"{plain.seconds / trial.seconds:.2f}",
        f"{trial.loss:.4f}{reached}",
        "" if trial.eval_loss is None else f"{trial.eval_loss:.4f}",
        "" if of_plain is None else f"{of_plain:.3f}",
    ]
