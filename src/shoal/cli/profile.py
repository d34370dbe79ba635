"""`shoal profile [RECIPE]`: time a few steps by part, and say what bounds them."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from shoal.cli.bench.common import check_file
from shoal.cli.overrides import parse
from shoal.cli.reports.profile import show_profile
from shoal.cli.train import Train, checked_job, run_job, write_summary
from shoal.comm.rendezvous.launcher_environment import read_environment
from shoal.config.duration import Duration
from shoal.config.recipe import Recipe
from shoal.errors import Problem, ShoalError


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Time a few steps of a recipe by part: data, forward, backward, waits by axis, update. Says what bounds them.

    Any key of the recipe can be set here, as for `shoal train`. The run is short and starts over: no earlier run or
    checkpoint is read or changed. Its directory is runs/NAME-profile.
    """

    recipe: Annotated[Path | None, tyro.conf.Positional] = None
    """A YAML file. None: the tiny llama on the source files of Python."""

    steps: int = 5
    """Steps to time, after three that are not."""

    trace: Path | None = None
    """Where to write the trace for https://ui.perfetto.dev. None: trace.json in the run directory."""

    html: Path | None = None
    """An HTML file to write: the page of the run, with the profile."""

    json: bool = False
    """Print the profile as one JSON object, and nothing else on stdout."""

    quiet: bool = False
    """Show no progress."""

    overcommit: bool = False
    """Start even if parameters, gradients and optimizer state exceed this machine's memory."""


def main(arguments: Sequence[str]) -> int:
    """Profile; 0 when the steps were timed."""
    start_time = time.time()
    options, reading = parse(ProfileOptions, arguments, prog="shoal profile")
    out = sys.stdout
    reading = reading.with_problems(_check(options))
    placement = read_environment(os.environ)
    is_main = placement is None or placement.rank == 0
    as_train = Train(json=options.json, quiet=options.quiet, overcommit=options.overcommit, resume="fresh")
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        for note in reading.notes if is_main else ():
            print(f"shoal: {note}", file=sys.stderr)
        job = checked_job(as_train, reading, placement, change=lambda recipe: short(recipe, options.steps))
        ranks = job.recipe.plan.layout.world_size
        summary = run_job(job, as_train, placement, ranks, start_time, only_profiles=True)
    if is_main:
        found = _finished(summary, options)
        write_summary(summary)  # a run without one is taken for dead
        show_profile(found, as_json=options.json, out=out)
        if options.html is not None and summary["run_directory"]:
            _write_page(options.html, Path(summary["run_directory"]), is_said=not options.json)
    return 130 if summary["was_stopped"] else 0


def _write_page(path: Path, run: Path, *, is_said: bool) -> None:
    from shoal.pages.report import make_report, write_page
    from shoal.pages.run.read_run import read_run

    write_page(path, make_report([read_run(run)]), "--html")
    if is_said:
        print(f"wrote {path}: a page", file=sys.stdout)


def short(recipe: Recipe, steps: int) -> Recipe:
    """The recipe of a short run in a directory of its own, that saves nowhere else."""
    from shoal.train.profile.of_recipe import steps_needed

    run = recipe.run.model_copy(
        update={
            "profile": Duration(steps, "step"),
            "duration": Duration(steps_needed(steps), "step"),
            "name": f"{recipe.run.name}-profile",
            "dir": f"{recipe.run.dir.rstrip('/')}-profile" if recipe.run.dir else None,
            "evaluate_every": Duration(0, "step"),
            "overwrite": False,
            "fast_dev_run": False,
        }
    )
    checkpoint = recipe.checkpoint.model_copy(update={"dir": None})
    return recipe.model_copy(update={"run": run, "checkpoint": checkpoint})


def _check(options: ProfileOptions) -> list[Problem]:
    found = []
    if options.steps < 1:
        found.append(Problem("R064", f"--steps must be at least 1, got {options.steps}", "--steps 5"))
    if options.trace is not None and not options.trace.absolute().parent.is_dir():
        what = f"--trace must be a file in a folder that exists, got {str(options.trace)!r}"
        found.append(Problem("R065", what, "--trace trace.json"))
    found += check_file(options.html, ".html")
    return found


def _finished(summary: dict[str, Any], options: ProfileOptions) -> dict[str, Any]:
    """The profile with the places of its files."""
    if "profile" not in summary:
        raise ShoalError(
            "the run ended before a step was timed", fix="shoal profile again, without a signal", code="T084"
        )
    directory = Path(summary["run_directory"]) if summary["run_directory"] else None
    trace = directory / "trace.json" if directory else None
    if options.trace is not None and trace is not None:
        shutil.copyfile(trace, options.trace)
        trace = options.trace
    return {
        **summary["profile"],
        "ranks_count": summary["ranks"],
        "trace": str(trace) if trace else None,
        "run_directory": summary["run_directory"],
    }
