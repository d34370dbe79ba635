"""`shoal bench compress [RECIPE]`: ways for replicas to meet, held against each other."""

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
from shoal.comm.rendezvous.environment import Placement, read_environment
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.bench.compress import CompressRequest, CompressTrials, Trial
    from shoal.train.recipe.preflight import Job

DEFAULT_NPROC = 2
PLAIN = "plain"
"""What gradients as they are go by, which no word of a plan says."""


@dataclass(frozen=True, kw_only=True)
class Compress:
    """Train a recipe for some steps by every way in which replicas can meet (compressed, every so many steps): bytes,
    seconds of a step predicted and measured, and the loss. Starts its own ranks; or is one, under torchrun, srun or
    mpirun on several hosts, whose link is then what counts.

    shoal bench compress recipes/tiny.yaml --steps 100 --methods compress=int8 "sync=diloco:50 compress=int8"
    """

    recipe: Annotated[Path | None, tyro.conf.Positional] = None
    """A YAML file. None: the tiny llama."""

    methods: tuple[str, ...] = ()
    """Words of a plan, each way in quotes if it has several. Gradients as they are (`plain`) are tried first, whether
    named or not: the other ways are held against them. None: all."""

    steps: int = 50
    """Steps of each way; of islands at least as many as lie between two meetings, and a multiple of them."""

    until_loss: float | None = None
    """End a way when its loss has come down to this, and tell when."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Try them all; 0."""
    options, recipe = parse(Compress, arguments, prog="shoal bench compress")
    ways = _ways(options.methods)
    if options.steps < 2:
        raise ShoalError(f"--steps {options.steps}: the first one pays for memory and connections", fix="--steps 20")
    place = read_environment(os.environ)
    ranks = place.world_size if place is not None else recipe.launch.nproc or DEFAULT_NPROC

    from shoal.bench.compress import EVERY, CompressRequest
    from shoal.parallel.checks import refuse_unbuilt
    from shoal.predict.estimate.replica_sync import sync_traffic
    from shoal.train.recipe.preflight import preflight

    job = preflight(recipe, ranks, tries_other_ways=True)
    plan = job.recipe.plan
    if plan.layout.dp_replicate < 2:
        fix = "--nproc 2 or more" if ranks == 1 else "--plan.dp_replicate 2, and ranks enough for two of them"
        raise ShoalError(f"plan '{plan.brief()}' has one replica, which meets nobody", fix=fix)
    for words in ways:
        refuse_unbuilt(sync_traffic(plan, words))
    ask = CompressRequest(ways=ways or EVERY, steps=options.steps, until=options.until_loss)
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        found = _measured(place, ranks, job, ask)
    if not found.is_main:
        return 0
    if options.json:
        print(json.dumps(to_mapping(found)), file=out)
    else:
        show(lambda console: render(console, found), out, width=WIDTH)
    return 0


def _ways(methods: Sequence[str]) -> tuple[str, ...]:
    """As words of a plan, gradients as they are first; none: not said."""
    from shoal.blueprint.plan import Plan

    said = ["" if words == PLAIN else words for words in methods]
    for words in said:
        plan = Plan.parse(words)
        if set(plan.to_mapping()) - {"compress", "sync"} or plan.sync == "auto":
            what = "leaves open" if plan.sync == "auto" else "says more than"
            raise ShoalError(
                f"--methods {words!r} {what} how replicas meet",
                fix='words of compress= and sync= alone, such as "sync=diloco:50 compress=int8"; the rest in --plan',
            )
    return tuple(dict.fromkeys(["", *said])) if said else ()


def _measured(place: Placement | None, ranks: int, job: Job, ask: CompressRequest) -> CompressTrials:
    from shoal.bench.compress import measure
    from shoal.launch.local import launch

    return measure(place, None, job, ask) if place is not None else launch(measure, (job, ask), nproc=ranks)[0]


def to_mapping(found: CompressTrials) -> dict[str, Any]:
    """For machines; times in seconds."""
    link, island, plain = found.weighed.link, found.weighed.island, found.plain
    return {
        "replicas": found.replicas,
        "parameters": island.size,
        "compute_seconds": island.compute,
        "link": {"latency_seconds": link.latency, "bytes_per_second": link.bandwidth},
        "codec_seconds_per_number": found.weighed.codec,
        "chosen": found.weighed.chosen.words or PLAIN,
        "why": found.weighed.why,
        "ways": [
            {
                **asdict(tried),
                "words": tried.words or PLAIN,
                "times_faster": plain.seconds / tried.seconds,
                "eval_loss_of_plain": _of_plain(tried, plain),
            }
            for tried in found.tried
        ],
    }


def render(console: Console, found: CompressTrials) -> None:
    """A table, and what was measured before."""
    link, island = found.weighed.link, found.weighed.island
    table = Table(title=f"{found.replicas} replicas of {island.size:,} parameters")
    for name in (
        "way",
        "sent a step, counted",
        "step, predicted",
        "measured",
        "x faster",
        "loss",
        "held out",
        "of plain",
    ):
        table.add_column(name, justify="left" if name == "way" else "right")
    for tried in found.tried:
        table.add_row(*_row(tried, found.plain, is_chosen=tried.words == found.weighed.chosen.words))
    console.print(table)
    console.print(
        f"measured before: {island.compute:.3f} s a step without meeting; the link carries"
        f" {link.bandwidth * 8 / 1e6:,.1f} Mbit/s from each rank, {link.latency * 1e3:.2f} ms a collective"
    )
    console.print(f"chosen (*): {found.weighed.chosen.name}: {found.weighed.why}")


def _of_plain(tried: Trial, plain: Trial) -> float | None:
    """The held-out loss, as a part of that of gradients as they are; None: nothing is held out."""
    return tried.eval_loss / plain.eval_loss if tried.eval_loss is not None and plain.eval_loss else None


def _row(tried: Trial, plain: Trial, *, is_chosen: bool) -> list[str]:
    of_plain = _of_plain(tried, plain)
    reached = f" in {tried.seconds_to_loss:.1f} s" if tried.seconds_to_loss is not None else ""
    return [
        f"{'* ' * is_chosen}{tried.words or PLAIN}",
        f"{tried.bytes / 1e6:,.3f} MB",
        f"{tried.predicted:.3f} s",
        f"{tried.seconds:.3f} s",
        f"{plain.seconds / tried.seconds:.2f}",
        f"{tried.loss:.4f}{reached}",
        "" if tried.eval_loss is None else f"{tried.eval_loss:.4f}",
        "" if of_plain is None else f"{of_plain:.3f}",
    ]
