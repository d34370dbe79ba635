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

from shoal.cli.screen import WIDTH, show
from shoal.cli.settings import parse
from shoal.comm.environment import Placement, read_environment
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.bench.compress import Ask, Found, Tried
    from shoal.train.job import Job

DEFAULT_NPROC = 2


@dataclass(frozen=True, kw_only=True)
class Compress:
    """Train a recipe for some steps by every way in which replicas can meet (compressed, every so many steps): bytes,
    seconds of a step predicted and measured, and the loss. Starts its own ranks; or is one, under torchrun, srun or
    mpirun on several hosts, whose link is then what counts.

    shoal bench compress recipes/tiny.yaml --steps 100 --methods "" compress=int8 sync=diloco:50
    """

    recipe: Annotated[Path | None, tyro.conf.Positional] = None
    """A YAML file. None: the tiny llama."""

    methods: tuple[str, ...] = ()
    """Words of a plan, each way one word in quotes; "" is gradients as they are. None: all."""

    steps: int = 50
    """Steps of each way; of islands at least as many as lie between two meetings, and a multiple of them."""

    until_loss: float | None = None
    """End a way when its loss has come down to this, and tell when."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Try them all; 0."""
    from shoal.blueprint.plan import Plan

    options, recipe = parse(Compress, arguments, prog="shoal bench compress")
    for words in options.methods:
        said = set(Plan.parse(words).to_mapping())
        if said - {"compress", "sync"} or "sync=auto" in words:
            raise ShoalError(
                f"--methods {words!r} says more than how replicas meet, or leaves it open",
                fix='words of compress= and sync= alone, such as "sync=diloco:50 compress=int8"; the rest in --plan',
            )
    if options.steps < 2:
        raise ShoalError(f"--steps {options.steps}: the first one pays for memory and connections", fix="--steps 20")
    place = read_environment(os.environ)
    ranks = place.world_size if place is not None else recipe.launch.nproc or DEFAULT_NPROC

    from shoal.bench.compress import EVERY, Ask
    from shoal.train.job import check

    job = check(recipe, ranks)
    if job.recipe.plan.layout.dp_replicate < 2:
        raise ShoalError(
            f"plan '{job.recipe.plan.brief()}' has one replica, which meets nobody", fix="--nproc 2 or more"
        )
    ask = Ask(ways=tuple(dict.fromkeys(options.methods)) or EVERY, steps=options.steps, until=options.until_loss)
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


def _measured(place: Placement | None, ranks: int, job: Job, ask: Ask) -> Found:
    from shoal.bench.compress import measure
    from shoal.launch.local import launch

    return measure(place, None, job, ask) if place is not None else launch(measure, (job, ask), nproc=ranks)[0]


def to_mapping(found: Found) -> dict[str, Any]:
    """For machines; times in seconds."""
    link, island = found.weighed.link, found.weighed.island
    return {
        "replicas": found.replicas,
        "parameters": island.size,
        "compute_seconds": island.compute,
        "link": {"latency_seconds": link.latency, "bytes_per_second": link.bandwidth},
        "codec_seconds_per_number": found.weighed.codec,
        "chosen": found.weighed.chosen.words,
        "why": found.weighed.why,
        "ways": [asdict(tried) for tried in found.tried],
    }


def render(console: Console, found: Found) -> None:
    """A table, and what was measured before."""
    link, island = found.weighed.link, found.weighed.island
    plain = next((tried for tried in found.tried if not tried.words), None)
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
        table.add_row(*_row(tried, plain, is_chosen=tried.words == found.weighed.chosen.words))
    console.print(table)
    console.print(
        f"measured before: {island.compute:.3f} s a step without meeting; the link carries"
        f" {link.bandwidth * 8 / 1e6:,.1f} Mbit/s from each rank, {link.latency * 1e3:.2f} ms a collective"
    )
    console.print(f"chosen (*): {found.weighed.chosen.name}: {found.weighed.why}")


def _row(tried: Tried, plain: Tried | None, *, is_chosen: bool) -> list[str]:
    of_plain = ""
    if plain is not None and tried.eval_loss is not None and plain.eval_loss:
        of_plain = f"{tried.eval_loss / plain.eval_loss:.3f}"
    reached = f" in {tried.seconds_to_loss:.1f} s" if tried.seconds_to_loss is not None else ""
    return [
        f"{'* ' * is_chosen}{tried.words or 'gradients as they are'}",
        f"{tried.bytes / 1e6:,.3f} MB",
        f"{tried.predicted:.3f} s",
        f"{tried.seconds:.3f} s",
        f"{plain.seconds / tried.seconds:.2f}" if plain is not None else "",
        f"{tried.loss:.4f}{reached}",
        "" if tried.eval_loss is None else f"{tried.eval_loss:.4f}",
        of_plain,
    ]
