"""`shoal train [RECIPE]`: start the workers, or be one of them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shoal.blueprint.settings import dump_recipe
from shoal.cli.settings import parse

if TYPE_CHECKING:
    from shoal.train.job import Job


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a recipe. Any key of it can be set here: --optim.lr 3e-4, --plan "dp_replicate=2 mb=4", --plan.mb 8.

    Short names: --nproc (launch.nproc), --device (launch.device).
    """

    recipe: Annotated[Path | None, tyro.conf.Positional] = None
    """A YAML file. None: the tiny llama on Python's own source."""

    json: bool = False
    """Print one JSON object, the summary, and nothing else on stdout."""

    quiet: bool = False
    """Show no progress."""

    dry_run: bool = False
    """Check everything, print the resolved recipe and the layout, and stop."""


def main(arguments: Sequence[str]) -> int:
    """Train; 0 when the run reached its end, 130 when it was asked to stop before."""
    began = time.time()
    options, recipe = parse(Train, arguments, prog="shoal train")

    # torch is loaded from here on: once, in the process that the workers are forked from.
    from shoal.comm.environment import read_environment
    from shoal.launch.local import default_nproc, launch
    from shoal.observe.directory import RunDirectory
    from shoal.train.job import check
    from shoal.train.loop import train

    placement = read_environment(os.environ)
    is_main = placement is None or placement.rank == 0
    world_size = placement.world_size if placement else recipe.launch.nproc or default_nproc(recipe.launch.device)
    job = check(recipe, world_size)
    if options.dry_run:
        if is_main:
            _show_plan(job, options)
        return 0
    keeps = is_main and not recipe.run.fast_dev_run
    directory = RunDirectory.claim(job.recipe) if keeps else None
    arguments_of_train = (job, directory.path if directory else None, options.quiet or options.json, began)
    if placement or world_size == 1:
        summary = train(placement, None, *arguments_of_train)
    else:
        summary = launch(train, arguments_of_train, nproc=world_size)[0]
    if directory:
        directory.write_summary(summary)
    if is_main:
        _show_summary(summary, options)
    return 130 if summary["was_stopped"] else 0


def _show_plan(job: Job, options: Train) -> None:
    layout = job.recipe.plan.layout
    if options.json:
        print(json.dumps({"recipe": job.recipe.model_dump(mode="json"), "ranks": layout.world_size}))
    else:
        print(dump_recipe(job.recipe) + "\n" + layout.draw())


def _show_summary(summary: dict[str, Any], options: Train) -> None:
    if options.json:
        print(json.dumps(summary))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="stopped early" if summary["was_stopped"] else "done", show_header=False, title_justify="left")
    for name, value in _rows(summary):
        table.add_row(name, value)
    Console().print(table)


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary in words; every figure says how it was come by."""
    rows = [
        ("steps", f"{summary['steps']:,} ({summary['tokens']:,} tokens)"),
        ("loss", f"{summary['loss_first']:.4f} at the first step, {summary['loss_last']:.4f} over the last ten"),
        ("held-out loss", "no held-out samples" if summary["eval_loss"] is None else f"{summary['eval_loss']:.4f}"),
        ("plan", f"{summary['plan']} on {summary['ranks']} rank{'s' if summary['ranks'] > 1 else ''}"),
        (
            "speed, measured",
            f"{summary['tokens_per_s']:,.0f} tokens/s, {summary['step_seconds_median'] * 1e3:.1f} ms a step",
        ),
        ("waiting for data", f"{summary['data_wait_part']:.1%} of the time, measured"),
        ("memory, measured", f"{summary['memory_gib_max']:.2f} GiB peak on the fullest rank"),
        (
            "time, measured",
            f"{summary['seconds_to_first_step']:.1f} s to the first step, {summary['seconds_training']:.1f} s training",
        ),
        ("kept in", summary["directory"] or "nothing kept"),
    ]
    if summary["mfu"] is not None:
        rows.insert(5, ("MFU", f"{summary['mfu']:.1%} of the datasheet's peak"))
    if summary["skipped_steps"]:
        rows.insert(1, ("dropped steps", f"{summary['skipped_steps']} with gradients that were not finite"))
    return rows
