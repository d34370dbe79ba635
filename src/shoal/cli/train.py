"""`shoal train [RECIPE]`: start the workers, or be one of them."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import tyro

from shoal.cli.overrides import parse
from shoal.cli.process import ended_by_interrupt, import_for_workers, signals_as_exceptions, without_garbage_collection
from shoal.cli.reports.train_summary import show_summary
from shoal.comm.rendezvous.launcher_environment import Placement, read_environment
from shoal.config.checks.memory import has_no_accelerator
from shoal.config.checks.settings import check_incomplete
from shoal.config.load import RecipeReading
from shoal.config.recipe import Recipe
from shoal.errors import Findings, Problem, RunFailed, ShoalError, raise_if
from shoal.predict.cluster_parser import is_measured_here

if TYPE_CHECKING:
    from torch import nn

    from shoal.cli.agent.prepare import TrainVerb
    from shoal.predict.predict import Prediction
    from shoal.train.recipe.preflight import Checked, Job


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a recipe. Any key of it can be set here: --optim.lr 3e-4, --plan "dp_replicate=2 mb=4", --plan.mb 8.

    Short names: --nproc (launch.nproc), --device (launch.device).
    """

    recipe: Annotated[Path | None, tyro.conf.Positional] = None
    """A YAML file. None: the tiny llama on the source files of Python."""

    deepspeed: Path | None = None
    """A ds_config.json of DeepSpeed: its settings replace those of the recipe, and the command line replaces both."""

    json: bool = False
    """Print the summary as one JSON object, and nothing else on stdout."""

    quiet: bool = False
    """Show no progress."""

    dry_run: bool = False
    """Check everything, print the resolved recipe, the layout, memory and arithmetic of a step, and stop."""

    overcommit: bool = False
    """Start even if parameters, gradients and optimizer state exceed this machine's memory."""

    resume: str = "auto"
    """auto: resume an unfinished run of this recipe. latest: also a finished one. A number: resume from that step.
    fresh: start over, and remove an earlier run in --run.dir."""

    hosts: str | None = None
    """Hosts and their ranks: a:8,b:8, or a file with lines like `a slots=8`. None: this machine."""

    min_hosts: int | None = None
    """The least number of hosts to continue with when others are lost, until they return. None: wait for all."""

    ssh: str | None = None
    """The command that runs another one on {host}. None: SHOAL_SSH, or ssh. none: `shoal agent` is started there."""

    store: str | None = None
    """Where the state of a run on several hosts is: etcd://a:2379,b:2379/NAME. The same command on another host then
    waits, and takes over when this host is lost. None: in this process."""

    listen: str | None = None
    """The address of this host at which other hosts connect, and a port: 10.0.0.1:29400. The next port is used too."""


def main(arguments: Sequence[str]) -> int:
    """Train; 0 when the run reached its end, 130 when a signal stopped it before."""
    start_time = time.time()
    options, reading = parse(Train, arguments, prog="shoal train")
    out = sys.stdout
    # With --json, stdout is for the one object. What a user's model prints goes to stderr.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        if options.hosts is not None:
            return _train_on_hosts(options, arguments, reading, start_time, out)
        return _train(options, reading, start_time, out, read_environment(os.environ))


def as_verb() -> TrainVerb:
    """The parts of this verb that an agent of another host needs."""
    from shoal.cli.agent.prepare import TrainVerb

    parse_words = partial(parse, Train, prog="shoal train")
    return TrainVerb(parse=parse_words, checked_job=checked_job, write_result=_write_result)


def _train_on_hosts(
    options: Train, words: Sequence[str], reading: RecipeReading, start_time: float, out: TextIO
) -> int:
    from shoal.cli.agent.coordinate import place_on_hosts, train_on_hosts

    for note in reading.notes:
        print(f"shoal: {note}", file=sys.stderr)
    recipe = reading.complete(lambda each: check_incomplete(each, None))
    if options.dry_run:
        return _train(options, reading, start_time, out, place_on_hosts(options.hosts, recipe.launch.nproc))
    found = train_on_hosts(options, words, recipe, as_verb(), start_time)
    if found is None:  # another coordinator has led it to its end, and has shown the summary
        return 0
    summary, is_written = found
    show_summary(summary, as_json=options.json, out=out)
    return _exit_code(summary, is_written=is_written, is_main=True)


def _train(options: Train, reading: RecipeReading, start_time: float, out: TextIO, placement: Placement | None) -> int:
    is_main = placement is None or placement.rank == 0
    for note in reading.notes if is_main else ():
        print(f"shoal: {note}", file=sys.stderr)
    try:
        job = checked_job(options, reading, placement)
    except ShoalError as error:
        if placement is None or placement.local_rank == 0:
            raise
        return error.exit_code  # every rank of a machine finds the same problem; the first one reports it
    from shoal.train.recipe.dry_run import dry_run

    world_size = job.recipe.plan.layout.world_size
    if is_main and not (options.quiet or options.json):
        _print_lints(job.recipe, _num_ranks(job.recipe, placement)[1])
    if options.dry_run:
        from shoal.cli.reports.dry_run import show_dry_run
        from shoal.train.recipe.predict_step import predict_step  # the planner, which few runs need

        if is_main:
            if not job.recipe.run.fast_dev_run:  # which has no directory
                dry_run(job, options.resume)
            show_dry_run(job.recipe, predict_step(job.recipe), as_json=options.json, out=out)
        return 0
    summary = run_job(job, options, placement, world_size, start_time)
    if reading.translated:
        summary["deepspeed"] = list(reading.translated)
    is_written = _write_result(job, summary) if is_main else True
    if is_main:
        show_summary(summary, as_json=options.json, out=out)
    return _exit_code(summary, is_written=is_written, is_main=is_main)


def _write_result(job: Job, summary: dict[str, Any]) -> bool:
    """Write the summary, the measurement and the prediction beside the run; whether the summary was written."""
    is_written = write_summary(summary)
    if not _append_measurement(job, summary):
        _write_prediction(job, summary)
    return is_written


def _exit_code(summary: dict[str, Any], *, is_written: bool, is_main: bool) -> int:
    if summary.get("saves_failed") and summary["saved_step"] != summary["steps"]:
        if is_main:
            print("shoal: the last step is not saved; free space, and give the same command again", file=sys.stderr)
        return RunFailed.exit_code
    if not is_written:
        return RunFailed.exit_code
    return 130 if summary["was_stopped"] else 0


def checked_job(
    options: Train,
    reading: RecipeReading,
    placement: Placement | None,
    *,
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe,
) -> Job:
    """The job of a command without problems; else raise all of them. `change` is applied to the recipe first."""
    reading = reading.with_problems([*_check_resume(options.resume), *_check_hosts(options)])
    recipe = reading.complete(lambda each: check_incomplete(each, _known_ranks(each, placement)))
    found = _checked(options, placement, change(recipe))
    raise_if(found.problems)
    if found.chosen is not None and not options.json and (placement is None or placement.rank == 0):
        _print_choice(found.chosen)
    return found.job()


def _checked(options: Train, placement: Placement | None, recipe: Recipe) -> Checked:
    """Check all of a recipe."""
    _import_torch(recipe)
    from shoal.observe.run_directory import RunDirectory
    from shoal.train.recipe.preflight import check_recipe

    found, chosen = Findings(), None
    world_size, per_node = _num_ranks(recipe, placement)
    if recipe.run.planned:
        from shoal.train.recipe.auto_plan import check_best_plan  # the planner, which few runs need

        recipe, chosen, problems = check_best_plan(recipe, world_size, per_node)
        found += problems
        world_size = 1 if chosen is None else world_size
    check_size = partial(_check_size, options, per_node)
    checked = check_recipe(recipe, world_size, check_size=check_size)
    found += checked.problems
    if found.problems and recipe.run.dir and not recipe.run.fast_dev_run:
        found.of(RunDirectory.preview, recipe, "fresh")  # not compared with an earlier run: the recipe has to change
    return replace(checked, problems=found.problems, chosen=chosen)


def _num_ranks(recipe: Recipe, placement: Placement | None) -> tuple[int, int]:
    """The number of ranks, and of those on one machine."""
    if placement is not None:
        return placement.world_size, placement.local_world_size
    if recipe.launch.nproc is not None:
        return recipe.launch.nproc, recipe.launch.nproc
    from shoal.launch.local import default_nproc

    nproc = default_nproc(recipe.launch.device)
    return nproc, nproc


def _known_ranks(recipe: Recipe, placement: Placement | None) -> int | None:
    """The number of ranks; None: torch has to count the GPUs first."""
    if placement is None and recipe.launch.nproc is None:
        return 1 if recipe.launch.device == "cpu" or has_no_accelerator() else None
    return _num_ranks(recipe, placement)[0]


def _check_resume(resume: str) -> Iterator[Problem]:
    is_step = resume.isdecimal() and len(resume) <= 16
    if resume not in ("auto", "latest", "fresh") and not is_step:
        what = f"--resume must be auto, latest, fresh or a step, got {resume[:80]!r}"
        yield Problem("R032", what, "--resume auto")


def _check_hosts(options: Train) -> Iterator[Problem]:
    """Find options that have no effect without --hosts."""
    for name in ("min_hosts", "ssh", "listen", "store"):
        if options.hosts is None and getattr(options, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            yield Problem("N067", f"{flag} has no effect without --hosts", f"--hosts a:8,b:8, or leave {flag} out")


def _import_torch(recipe: Recipe) -> None:
    """Import torch and all that workers need, once, in the process that the workers are forked from."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes two lines to stderr, and reads this once
    with ended_by_interrupt(), without_garbage_collection():
        if not recipe.run.compile:
            from shoal.numerics import lazy_dynamo

            lazy_dynamo.install()
        import shoal.train.recipe.dry_run
        import shoal.train.recipe.loop  # noqa: F401


def _check_size(options: Train, ranks: int, recipe: Recipe, model: nn.Module) -> list[Problem]:
    """Find a model that does not fit the memory of this machine, or of its GPUs with one rank each."""
    from shoal.train.recipe.memory.fits import check_fits

    if options.overcommit:
        return []
    problems = list(check_fits(ranks)(recipe, model))
    if not options.dry_run:
        return problems
    for problem in problems:
        print(f"shoal: {problem.what}", file=sys.stderr)
    return []


def run_job(
    job: Job,
    options: Train,
    placement: Placement | None,
    world_size: int,
    start_time: float,
    *,
    only_profiles: bool = False,
) -> dict[str, Any]:
    """Run the job on workers that this process starts, or as one worker of another launcher."""
    from shoal.elastic.memory_tier import memory_tier
    from shoal.elastic.restart import RestartBudget, with_restarts
    from shoal.launch.local import launch
    from shoal.observe.failure_event import note_failure, noting_failure
    from shoal.train.recipe.invocation import RunInvocation
    from shoal.train.recipe.loop import train

    launched, settings = job.recipe.launch, job.recipe.checkpoint
    saves = not job.recipe.run.fast_dev_run
    quiet = options.quiet or options.json
    invocation = RunInvocation(
        save=saves,
        only_profiles=only_profiles,
        quiet=quiet,
        start_time=start_time,
        resume=options.resume,
        command=_name_of_command(placement),
    )
    if placement or world_size == 1:
        generation = placement.generation if placement else 0
        with noting_failure(job.recipe, invocation.command), _naming_shortened_data(job), _explaining_memory(job):
            return _train_here(train, placement, (job, replace(invocation, generation=generation)))

    with ended_by_interrupt():
        import_for_workers(job.recipe.plan)

    def start(generation: int) -> dict[str, Any]:
        began = start_time if not generation else time.time()
        restarted = replace(invocation, generation=generation, memory_root=root, start_time=began)
        limits: dict[str, Any] = {"grace_period": launched.grace_period, "timeout": launched.timeout}
        with noting_failure(job.recipe, invocation.command), _naming_shortened_data(job):
            replacing = budget if _replaces_ranks(job.recipe) else None
            return launch(train, (job, restarted), nproc=world_size, budget=replacing, **limits)[0]

    def say(text: str) -> None:
        print(f"shoal: {text}", file=sys.stderr, flush=True)

    note = partial(note_failure, job.recipe, invocation.command)
    budget = RestartBudget(most=launched.max_restarts if saves else 0, say=say, note=note)

    with (
        _explaining_memory(job),  # outside of the restarts: workers are forked from a process that has not computed
        signals_as_exceptions(),
        memory_tier(settings.memory_dir, say, saves_to=_saves_to(job.recipe, options.resume))
        if settings.memory_every.amount and saves
        else nullcontext() as root,
    ):
        return with_restarts(start, budget)


def _name_of_command(placement: Placement | None) -> str:
    """Identify this command in the lock of a run directory. A job that Slurm has requeued finds its directory by it,
    also while other runs of the same name are active. Under torchrun, each restart has a number of its own."""
    if placement is not None and placement.source == "slurm" and placement.job:
        return f"slurm-{placement.job}/"
    number = secrets.token_hex(8)
    return number if placement is None else f"{placement.source}/{number}"


def _replaces_ranks(recipe: Recipe) -> bool:
    """Whether one lost rank is replaced. Neither NCCL's groups nor compiled code were tried in a process that stays."""
    has_gpu = recipe.launch.device != "cpu" and not has_no_accelerator()
    return recipe.launch.recovery == "replace" and not has_gpu and not recipe.run.compile


def _saves_to(recipe: Recipe, resume: str) -> str:
    """The place where the run will save; raises if the run would be rejected there."""
    from shoal.observe.run_directory import RunDirectory

    resume = "fresh" if recipe.run.overwrite else resume
    return recipe.checkpoint.dir or str(RunDirectory.preview(recipe, resume).path / "checkpoints")


@contextmanager
def _naming_shortened_data(job: Job) -> Iterator[None]:
    """If a process was killed because a data file has become shorter, raise an error that names the file."""
    from shoal.train.recipe.preflight import reject_shortened_data

    try:
        yield
    except RunFailed:
        reject_shortened_data(job)
        raise


@contextmanager
def _explaining_memory(job: Job) -> Iterator[None]:
    """If a rank had no memory left, raise an error that has its memory by cause, and a plan that would fit."""
    try:
        yield
    except RunFailed as error:
        if not error.memory:
            raise
        from shoal.train.recipe.memory.explain import explained  # the planner, which few runs need

        raise explained(job.recipe, error) from error.__cause__


def _print_choice(chosen: Prediction) -> None:
    """Print the plan that the planner has chosen."""
    seconds, gib = chosen.time.total, chosen.memory.total / 2**30
    words = f"plan: auto is {chosen.plan.brief()}: {seconds * 1e3:,.0f} ms a step and {gib:.1f} GiB predicted"
    print(words, file=sys.stderr)
    if not is_measured_here():
        print("no calibration found; using defaults. Run `shoal calibrate`", file=sys.stderr)


def _print_lints(recipe: Recipe, per_node: int) -> None:
    """Print the rules that the plan breaks, and that are predicted to cost more than 5 % of a step."""
    from shoal.cli.reports.train_lints import costly_lints, in_one_line

    with suppress(Exception):  # advice: nothing in it may keep a run from starting
        for one in costly_lints(recipe, per_node):
            print(f"shoal: {in_one_line(one)}", file=sys.stderr)


def _append_measurement(job: Job, summary: dict[str, Any]) -> bool:
    """Append a row with prediction and measurement to `measured.csv` beside the run, for `shoal backtest`; whether the
    run now has a prediction, or needs none."""
    made_steps = summary["seconds_to_first_step"] is not None  # else the run was resumed at its end
    if summary["run_directory"] and not summary["was_stopped"] and made_steps:
        from shoal.train.recipe.predict_step import append_measurement

        with suppress(Exception):  # no preset for the machine, or a full disk: the run has ended well anyway
            return append_measurement(job.recipe, summary, Path(summary["run_directory"]).parent / "measured.csv")
    return True


def _write_prediction(job: Job, summary: dict[str, Any]) -> None:
    """Write what the planner predicts of a model that is no preset into the directory of the run, for its page."""
    from shoal.train.recipe.predict_step import write_prediction

    with suppress(Exception):  # no preset for the machine, a model that the planner cannot read, or a full disk
        write_prediction(job.recipe, Path(summary["run_directory"]), summary["ranks_per_host"])


def _train_here(
    train: Callable[..., dict[str, Any]], placement: Placement | None, arguments: tuple[Any, ...]
) -> dict[str, Any]:
    """Train in this process. A failure is reported as `launch` reports one of its workers."""
    from shoal.launch.failure import failure_of

    try:
        return train(placement, None, *arguments)
    except ShoalError:
        raise
    except (Exception, SystemExit) as error:  # `sys.exit(0)` in a model is not the end of a run
        rank, size = (placement.rank, placement.world_size) if placement else (0, 1)
        failure = failure_of(rank, error)
        text = f"rank {rank} of {size} failed: {failure.what}\n{failure.details}"
        failed = RunFailed(text, fix=failure.fix, code=failure.code)
        failed.memory = {"rank": rank, **failure.memory} if failure.lacks_memory else {}
        raise failed from error


def write_summary(summary: dict[str, Any]) -> bool:
    """Write the summary to the run directory, if there is one; whether that worked."""
    from shoal.observe.run_directory import RunDirectory

    if summary["run_directory"]:
        try:
            RunDirectory(Path(summary["run_directory"])).write_summary(summary)
        except ShoalError as error:
            print(f"shoal: {error.on_command_line()}", file=sys.stderr)
            return False
    return True
