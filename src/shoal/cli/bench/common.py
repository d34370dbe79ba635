"""Options, files and progress that the benchmarks of training share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.blueprint.plan_parser import read_words
from shoal.comm.rendezvous.launcher_environment import read_environment
from shoal.config.recipe import Recipe
from shoal.doctor.checks.cores import whole_cores
from shoal.errors import Problem

PER_CORE = 8
"""The most ranks of a core that are started: beyond, a measurement is of waiting alone."""
Say = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Numbers:
    """Numbers of ranks, or the problems of their words."""

    nproc: tuple[int, ...]
    problems: tuple[Problem, ...] = ()


def parse_nproc(text: str) -> Numbers:
    """`1,2,4` → (1, 2, 4).

    >>> parse_nproc("2,1,2").nproc
    (1, 2)
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and 0 < int(word) < 10**6 for word in words):
        what = f"--nproc must be numbers of ranks, each 1 or more, got {text[:80]!r}"
        return Numbers((1,), (Problem("N110", what, "--nproc 1,2"),))
    return Numbers(tuple(sorted({int(word) for word in words})))


def parse_plans(text: str, default: Sequence[str]) -> tuple[tuple[str, ...], list[Problem]]:
    """`ddp,zero=3,tp=2 zero=1` → its plans; the problems of their words."""
    plans = tuple(dict.fromkeys(" ".join(part.split()) for part in text.split(",") if part.strip()))
    problems = [problem for words in plans for problem in read_words(words).problems]
    if not plans:
        problems.append(Problem("R038", "--plans must not be empty", f"--plans {','.join(default)}"))
    return plans, problems


def check_ranks(nproc: Sequence[int], recipe: Recipe, num_gpus: int) -> Iterator[Problem]:
    """Find more ranks than this machine can run."""
    most = max(nproc)
    if recipe.launch.device != "cpu" and num_gpus:
        if most > num_gpus:
            gpus = f"{num_gpus} GPU{'s' * (num_gpus > 1)}"
            fits = ",".join(map(str, (each for each in nproc if each <= num_gpus))) or "1"
            what = f"--nproc must be at most the {gpus} of this machine, got {most}"
            yield Problem("N111", what, f"--nproc {fits}, or --device cpu")
    elif most > PER_CORE * whole_cores():
        here = f"{whole_cores()} core{'s' * (whole_cores() > 1)}"
        what = f"--nproc must be at most {PER_CORE * whole_cores()} on {here}, got {most}"
        yield Problem("N111", what, f"--nproc {','.join(map(str, sorted({1, whole_cores()})))}")


def check_alone(name: str) -> Iterator[Problem]:
    """Find a launcher that has started several of us."""
    place = read_environment(os.environ)
    if place is not None and place.world_size > 1:
        what = f"bench {name} must be started as one process, got {place.world_size} from {place.source}"
        yield Problem("R033", what, f"shoal bench {name}, without {place.source}")


def check_steps(steps: int, rounds: int) -> Iterator[Problem]:
    """Find too few steps for the rounds."""
    if rounds < 1:
        yield Problem("R036", f"--rounds must be 1 or more, got {rounds}", "--rounds 3")
    elif steps < rounds:
        what = f"--steps must be {rounds} or more, at least one for each round, got {steps}"
        yield Problem("R036", what, "--steps 30")


def check_file(path: Path | None, ending: str) -> list[Problem]:
    """Find a file that cannot be written, before the measurement takes a minute."""
    if path is None:
        return []
    if path.suffix != ending:
        return [Problem("R037", f"the file must end in {ending}, got {path}", str(path.with_suffix(ending)))]
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        return [Problem("R037", f"{path} cannot be written", f"a file that ends in {ending}, in an existing folder")]
    return []


@contextmanager
def progress(*, quiet: bool) -> Iterator[Say]:
    """Report each turn: a bar on a terminal, else a line."""
    if quiet:
        yield lambda name, number, total: None
    elif not sys.stderr.isatty():
        yield lambda name, number, total: print(f"{number + 1}/{total}  {name}", file=sys.stderr, flush=True)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("")
            yield lambda name, number, total: bar.update(task, description=name, completed=number, total=total)
