"""`shoal chaos [RECIPE]`: disturb a run with seeded faults, and compare it with an undisturbed one."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

import shoal.cli
from shoal.chaos.api import Request, left_out_here, run_chaos
from shoal.chaos.drill import Screen
from shoal.chaos.kinds import KINDS
from shoal.cli.overrides import parse
from shoal.cli.process import signals_as_exceptions
from shoal.cli.reports.console import WIDTH, show
from shoal.config.recipe import Recipe
from shoal.errors import Problem, listed, nearest

TINY = """
model: {name: llama, preset: tiny, num_layers: 1, hidden: 32, ffn: 48}
data: {source: synthetic, synthetic_samples: 4096, validation: 0, seq_len: 32, global_batch: 12, workers: 0}
launch: {device: cpu, threads: 1, nproc: 2}
checkpoint: {every: 10step}
plan: fp64
"""
TINY_PACE = 0.1
"""Seconds of a step of that recipe: as if the model were larger, and without load for this machine."""


@dataclass(frozen=True, kw_only=True)
class Chaos:
    """Start `shoal train`, and kill, stop and disturb it by a schedule of faults that follows from a seed. Then run the
    same recipe undisturbed, and compare every loss, every sample and the last checkpoint. Exit code 0: all promises
    hold, 1: one is broken.

    shoal chaos --faults 10 --minutes 2 --nproc 4
    """

    recipe: Annotated[Path | None, tyro.conf.Positional] = None
    """A YAML file. None: a tiny llama whose steps take a tenth of a second."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""

    faults: int = 30
    """Number of faults."""

    seed: int = 0
    """The seed of the schedule: the same seed gives the same faults."""

    minutes: float = 10.0
    """The length of the disturbed run, about."""

    steps: int | None = None
    """Steps of the run. None: as many as fit into --minutes; a short run measures them."""

    hosts: int = 1
    """Hosts with --nproc ranks each, as network namespaces of this machine; more than one needs root."""

    kinds: str = "all"
    """Kinds of faults, separated by commas. all: every kind that can be made here."""

    pace: float | None = None
    """The least seconds of a step: slower steps without load. None: 0.1 for the tiny llama, else 0."""

    dir: Path | None = None
    """A new folder for both runs, which stays. None: nothing stays."""

    dry_run: bool = False
    """Print the schedule, and stop."""


def main(arguments: Sequence[str]) -> int:
    """Run a drill; 0 when all promises hold, 1 when one is broken."""
    with tempfile.TemporaryDirectory() as folder:
        words = list(arguments)
        options, reading = parse(Chaos, words, prog="shoal chaos")
        is_tiny = options.recipe is None
        if is_tiny:
            tiny = Path(folder) / "tiny.yaml"
            tiny.write_text(TINY)
            options, reading = parse(Chaos, [str(tiny), *words], prog="shoal chaos")
    recipe = reading.with_problems([*_check(options)]).complete()
    for note in reading.notes:
        print(f"shoal: {note}", file=sys.stderr)
    return _run(options, recipe, is_tiny=is_tiny)


def _run(options: Chaos, recipe: Recipe, *, is_tiny: bool) -> int:
    from shoal.chaos.report import render

    usual_pace = TINY_PACE if is_tiny else 0.0
    request = Request(
        recipe=recipe,
        faults=options.faults,
        seed=options.seed,
        minutes=options.minutes,
        steps=options.steps,
        hosts=options.hosts,
        ranks_per_host=recipe.launch.nproc or 2,
        kinds=_kinds(options.kinds),
        pace=usual_pace if options.pace is None else options.pace,
        folder=options.dir,
        main=shoal.cli.main if "torch" in sys.modules else None,
    )
    if options.dry_run:
        schedule = [str(each) for each in request.schedule()]
        print(json.dumps({"schedule": schedule}) if options.json else "\n".join(schedule))
        return 0
    for each in request.schedule():
        print(f"  {each}", file=sys.stderr)
    with signals_as_exceptions():
        report = run_chaos(request, _screen())
    if options.json:
        print(json.dumps(report.to_mapping()))
    else:
        show(lambda console: render(console, report), sys.stdout, width=WIDTH)
    return 1 if any(report.broken()) else 0


def _screen() -> Screen:
    """Lines with the time on stderr, and a progress line on a terminal."""
    began, is_terminal = time.monotonic(), sys.stderr.isatty()

    def show(text: str, end: str = "") -> None:
        if is_terminal or end:
            before, after = ("\r", "\x1b[K") if is_terminal else ("", "")
            line = f"shoal chaos: {time.monotonic() - began:6.1f} s  {text}"
            print(f"{before}{line}{after}", end=end, file=sys.stderr, flush=True)

    return Screen(lambda text: show(text, "\n"), show)


def _kinds(text: str) -> tuple[str, ...]:
    return tuple(KINDS) if text == "all" else tuple(text.split(","))


def _check(options: Chaos) -> Iterator[Problem]:
    kinds = _kinds(options.kinds)
    for kind in kinds:
        if kind not in KINDS:
            near = nearest(kind, tuple(KINDS))
            yield Problem("N080", f"--kinds has an unknown fault {kind!r}", near or f"one of {listed(tuple(KINDS))}")
    for name, least in (("faults", 1), ("hosts", 1), ("minutes", 0.05), ("steps", 20), ("pace", 0)):
        value = getattr(options, name)
        if value is not None and not least <= value <= 10**6:
            yield Problem("N080", f"--{name} must be {least} or more, got {value}", f"--{name} {max(least, 1)}")
    away = left_out_here(tuple(kind for kind in kinds if kind in KINDS), options.hosts)
    if away and len(away) == len(kinds):
        what = f"none of --kinds {','.join(kinds)} can be made here: {', '.join(f'{k} {v}' for k, v in away.items())}"
        yield Problem("N084", what, "--kinds kill,stop,gil")
