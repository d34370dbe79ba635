"""From the words of `shoal launch` to a checked `JobSpec`: the options that all schedulers share."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from shoal.cli.overrides import parse, settings_as_words
from shoal.config.checks.settings import check_incomplete
from shoal.config.load import RecipeReading
from shoal.config.recipe import Recipe
from shoal.errors import Findings, Problem, raise_if
from shoal.jobs.spec import MAX_REQUEUES, JobSpec, read_env
from shoal.jobs.sweep import read_sweep
from shoal.jobs.time_limit import read_time

Options = TypeVar("Options", bound="JobOptions")

_NPROC = re.compile(r"--nproc (\d+( or \d+)?)")

REPEATED = ("--env", "--setup", "--array", "--sbatch")
"""Options that may be given several times. Each is one text, with a line for each time."""


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of every scheduler."""

    recipe: Annotated[Path | None, tyro.conf.Positional] = None
    """A YAML file."""

    deepspeed: Path | None = None
    """A config of DeepSpeed. Its keys become settings of the command that the job runs."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""

    nodes: int = 1
    """Machines of the job."""

    gpus: int | None = None
    """GPUs of one machine. None: none for a recipe with launch.device cpu."""

    ranks_per_node: int | None = None
    """Processes on one machine. None: one for each GPU; without GPUs one."""

    cpus: int | None = None
    """CPU cores of one process. None: the scheduler's default."""

    memory: str | None = None
    """Memory of one machine, such as 200G. None: the scheduler's default."""

    time: str | None = None
    """The time limit: HOURS:MINUTES:SECONDS, DAYS-HOURS or MINUTES. None: the scheduler's default."""

    job_name: str | None = None
    """The name of the job. None: run.name of the recipe."""

    env: str = ""
    """A variable of the run, NAME=VALUE; may be given several times."""

    setup: str = ""
    """A line of shell before the run, such as 'source venv/bin/activate'; may be given several times."""

    max_requeues: int | None = None
    """How often a job of Slurm may be started again, after it was stopped or lost a machine. None: 20."""

    submit: bool = False
    """Submit the job. Without it, the file is printed and nothing happens."""

    again: bool = False
    """With --submit: also if the same job waits or runs already."""

    dry_run: bool = False
    """Print the file, and submit nothing; the default."""

    unchecked: bool = False
    """With --submit: check the settings and the plan alone; model and data are not on this host."""

    @property
    def num_ranks(self) -> int:
        """Processes on all machines."""
        return self.nodes * (self.ranks_per_node or self.gpus or 1)


@dataclass(frozen=True)
class Request:
    """A job whose options and recipe have no problems."""

    options: Any
    spec: JobSpec
    recipe: Recipe
    command: str
    """The words of this command."""


def read_options(kind: type[Options], arguments: Sequence[str], *, prog: str) -> tuple[Options, RecipeReading]:
    """The options and the recipe, with the problems so far."""
    return parse(kind, join_repeated(arguments), prog=prog)


def join_repeated(arguments: Sequence[str]) -> list[str]:
    """The words with each repeated option once; its values are joined by lines.

    >>> join_repeated(["a.yaml", "--env", "A=1", "--env=B=2"])
    ['a.yaml', '--env=A=1\\nB=2']
    """
    words, others, values = list(arguments), list[str](), dict[str, list[str]]()
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in REPEATED or (not equals and not words):
            others.append(word)
            continue
        values.setdefault(flag, []).append(value if equals else words.pop(0))
    return others + [f"{flag}={chr(10).join(each)}" for flag, each in values.items()]


def checked_request(
    options: JobOptions,
    reading: RecipeReading,
    arguments: Sequence[str],
    *,
    prog: str,
    problems: Sequence[Problem] = (),
    **more: Any,
) -> Request:
    """The job of a command; raises all problems of its options, its recipe and its plan at once.

    `more`: further fields of the spec, and `problems` those of further options.
    """
    found = Findings()
    found += problems
    recipe = reading.recipe
    found += _check_recipe(options, recipe, prog)
    env, wrong = read_env(options.env)
    found += wrong
    seconds = None if options.time is None else found.of(read_time, options.time)
    typed = settings_as_words(type(options), join_repeated(arguments))
    settings = (*(word for name, value in reading.of_config for word in (f"--{name}", value)), *typed)
    if "--launch.nproc" in typed:
        what = f"--nproc has no effect on {prog}: a job has --nodes times --ranks-per-node ranks, {options.num_ranks}"
        found += [Problem("J009", what, "leave it out, with --nodes and --gpus or --ranks-per-node")]
    for note in reading.notes:
        print(note, file=sys.stderr)
    sweep = found.of(read_sweep, getattr(options, "array", "")) or []
    gpus = options.gpus or 0
    ranks = options.ranks_per_node or gpus or 1
    spec = JobSpec(
        name=options.job_name or recipe.run.name,
        words=(str(options.recipe), *settings, *_settings_of_job(options.nodes, ranks)),
        nodes=options.nodes,
        gpus=gpus,
        ranks_per_node=ranks,
        cpus=options.cpus,
        memory=options.memory,
        seconds=seconds,
        max_requeues=MAX_REQUEUES if options.max_requeues is None else options.max_requeues,
        max_failures=recipe.launch.max_restarts,
        env=env,
        setup=tuple(options.setup.split("\n")) if options.setup else (),
        variants=tuple(_variant(number, each, recipe) for number, each in enumerate(sweep)),
        **more,
    )
    found += spec.check()
    recipe = reading.with_problems(found.problems).complete(lambda each: _check_settings(each, spec.num_ranks))
    check_plan(options, recipe, sweep, spec.num_ranks, settings)
    return Request(options, spec, recipe, shlex.join([*prog.split(), *arguments]))


def program_here(*, is_elsewhere: bool) -> tuple[str, ...]:
    """The command that is shoal: this Python's, unless a container or an environment brings its own."""
    return ("shoal",) if is_elsewhere else (sys.executable, "-m", "shoal")


def _settings_of_job(nodes: int, ranks: int) -> tuple[str, ...]:
    """A job of one process gets no rank from its scheduler, and would start `launch.nproc` of the recipe."""
    return ("--launch.nproc", "1") if nodes * ranks == 1 else ()


def _variant(number: int, settings: dict[str, str], recipe: Recipe) -> tuple[str, ...]:
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    folder = recipe.run.dir or f"runs/{recipe.run.name}-array"
    return (*words, "--run.dir", f"{folder}/{number}")


def check_no_requeues(options: JobOptions, prog: str) -> Iterator[Problem]:
    """Find a budget of starts for a scheduler that has none: it starts a run that has saved again without counting."""
    if options.max_requeues is not None:
        what = f"--max-requeues has no effect on {prog}: starts after a run has saved are not counted there"
        yield Problem("J009", what, "leave it out; launch.max_restarts counts failures")


def _check_recipe(options: JobOptions, recipe: Recipe, prog: str) -> list[Problem]:
    """Find a recipe that does not go with these machines, or with a job that starts several times."""
    found = []
    device = recipe.launch.device
    if options.recipe is None:
        found.append(Problem("R054", f"{prog} needs RECIPE", f"{prog} recipes/tiny.yaml"))
    if options.gpus is None and device != "cpu":
        what = f"{prog} needs --gpus, the GPUs of one machine: launch.device is {device}"
        found.append(Problem("J007", what, "--gpus 8, or --launch.device cpu"))
    elif options.gpus and device == "cpu":
        what = f"launch.device cpu would leave the {options.gpus} GPUs of each machine idle"
        found.append(Problem("J007", what, "--gpus 0, or --launch.device cuda"))
    elif options.gpus == 0 and device == "cuda":
        found.append(Problem("J007", "launch.device cuda needs GPUs, got --gpus 0", "--gpus 8, or --launch.device cpu"))
    ranks = options.ranks_per_node
    if options.gpus and device != "cpu" and ranks is not None and ranks != options.gpus:
        what = (
            f"--ranks-per-node {ranks} does not go with --gpus {options.gpus}: each rank computes on a GPU of its own"
        )
        found.append(Problem("J007", what, f"leave --ranks-per-node out, or --gpus {ranks}"))
    if recipe.run.overwrite:
        what = "run.overwrite would remove the run when the job is started again"
        found.append(Problem("J008", what, "--run.overwrite false, and --run.dir A_NEW_DIRECTORY"))
    return found


def _check_settings(recipe: Recipe, ranks: int) -> list[Problem]:
    """Find problems of the settings on so many ranks. Their number is that of the machines, not `--nproc`."""
    found = check_incomplete(recipe, max(ranks, 1))
    return [replace(each, fix=_NPROC.sub(r"--nodes and --gpus with \1 ranks in all", each.fix)) for each in found]


def check_plan(
    options: JobOptions, recipe: Recipe, sweep: Sequence[dict[str, str]], ranks: int, settings: Sequence[str]
) -> None:
    """Raise all problems of the plan on the ranks of the job, for each job of a sweep.

    Before a job is submitted, model and data are checked, too: a mistake would be seen only after the job has waited.
    """
    raise_if(_check_settings(recipe, ranks))
    for each in sweep:
        words = [str(options.recipe), *settings, *(f"--{name}={value}" for name, value in each.items())]
        reading = parse(JobOptions, words, prog="shoal launch")[1]
        varied = reading.complete(lambda one: _check_settings(one, ranks))
        raise_if(_check_settings(varied, ranks), title=f"the job with {', '.join(map('='.join, each.items()))}")
    if options.submit and not options.dry_run and not options.unchecked and not recipe.run.planned:
        from shoal.train.recipe.preflight import check_recipe  # torch

        raise_if(check_recipe(recipe, ranks).problems, title="the recipe; --unchecked, if model and data are not here")
