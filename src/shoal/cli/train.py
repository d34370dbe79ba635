"""`shoal train [RECIPE]`: start the workers, or be one of them."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import tyro

from shoal.blueprint.layout_drawing import draw_layout
from shoal.blueprint.plan import Plan
from shoal.cli.memory_check import has_no_accelerator, host_memory, parameters_of_preset, refuse_too_large, too_large
from shoal.cli.overrides import parse
from shoal.comm.rendezvous.environment import Placement, read_environment
from shoal.config.load import dump_recipe
from shoal.config.recipe import Recipe
from shoal.errors import RunFailed, ShoalError
from shoal.predict.cluster import is_measured_here

if TYPE_CHECKING:
    from shoal.train.recipe.preflight import Job


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

    overcommit: bool = False
    """Start also where parameters, gradients and optimizer state alone exceed this machine's memory."""

    resume: str = "auto"
    """auto: go on with a run of this recipe that has not ended. latest: also with one that has. A number: from that
    step. fresh: begin anew; an earlier run in --run.dir is removed."""


def main(arguments: Sequence[str]) -> int:
    """Train; 0 when the run reached its end, 130 when it was asked to stop before."""
    began = time.time()
    options, recipe = parse(Train, arguments, prog="shoal train")
    out = sys.stdout
    # Under --json what a user's model prints goes elsewhere: stdout is for the one object.
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        return _train(options, recipe, began, out)


def _train(options: Train, recipe: Recipe, began: float, out: TextIO) -> int:
    is_step = options.resume.isdecimal() and len(options.resume) <= 16
    if options.resume not in ("auto", "latest", "fresh") and not is_step:
        raise ShoalError(
            f"--resume {options.resume[:80]!r} is not known", fix="--resume auto, latest, fresh, or a step"
        )
    placement = read_environment(os.environ)
    is_main = placement is None or placement.rank == 0
    _refuse_early(options, recipe, placement)

    # torch is loaded from here on: once, in the process that the workers are forked from.
    with _ended_by_interrupt(), _uncollected():
        if not recipe.run.compile:
            from shoal.numerics import lazy_dynamo

            lazy_dynamo.install()
        import shoal.train.recipe.loop  # noqa: F401  # all that workers need
        from shoal.launch.local import default_nproc
        from shoal.train.recipe.dry_run import dry_run
        from shoal.train.recipe.preflight import preflight

    world_size = placement.world_size if placement else recipe.launch.nproc or default_nproc(recipe.launch.device)
    try:
        if recipe.run.planned:
            per_node = placement.local_world_size if placement else world_size
            recipe = _planned(recipe, world_size, per_node, is_quiet=not is_main or options.json)
        job = preflight(recipe, world_size)
        _refuse_too_large(options, job.recipe, placement.local_world_size if placement else world_size)
    except ShoalError as error:
        if placement is None or placement.local_rank == 0:
            raise
        return error.exit_code  # every rank of a machine finds the same; one says it
    if options.dry_run:
        if is_main:
            if not job.recipe.run.fast_dev_run:  # which has no directory
                dry_run(job, options.resume)
            _show_plan(job, options, out)
        return 0
    summary = _carried_out(job, options, placement, world_size, began)
    is_kept = _keep_and_show(summary, options, out) if is_main else True
    if is_main:
        _note_for_backtest(job, summary)
    if summary.get("saves_failed") and summary["saved_step"] != summary["steps"]:
        if is_main:
            print("shoal: the last step is not on the disk: make room, and the same command goes on", file=sys.stderr)
        return RunFailed.exit_code
    if not is_kept:
        return RunFailed.exit_code
    return 130 if summary["was_stopped"] else 0


def _refuse_early(options: Train, recipe: Recipe, placement: Placement | None) -> None:
    """Reject a preset that this machine's memory cannot hold before torch is loaded, where there is no GPU."""
    ranks = placement.local_world_size if placement else recipe.launch.nproc or 1
    world_size = placement.world_size if placement else ranks
    is_host = recipe.launch.device == "cpu" or (recipe.launch.device == "auto" and has_no_accelerator())
    parameters = parameters_of_preset(recipe)
    if options.dry_run or options.overcommit or recipe.run.planned or not is_host or parameters is None:
        return
    try:
        plan = recipe.plan.resolve(world_size)
    except ShoalError:  # of which `check` says more
        return
    if not placement or placement.local_rank == 0:
        refuse_too_large(recipe, plan, parameters, ranks=ranks, memory=host_memory())


def _refuse_too_large(options: Train, recipe: Recipe, ranks: int) -> None:
    """The same for any model, and for GPUs, each of which has a rank."""
    import torch

    from shoal.train.build_model import build_model, without_memory

    model = without_memory(lambda: build_model(recipe.model))
    if options.overcommit or model is None:
        return
    on_gpu = recipe.launch.device != "cpu" and torch.cuda.is_available() and recipe.plan.offload == "none"
    devices = range(min(ranks, torch.cuda.device_count()) if on_gpu else 0)
    memory = sum(torch.cuda.get_device_properties(n).total_memory for n in devices) if on_gpu else host_memory()
    parameters = sum(each.numel() for each in model.parameters() if each.requires_grad)
    if not options.dry_run:
        refuse_too_large(recipe, recipe.plan, parameters, ranks=ranks, memory=memory)
    elif what := too_large(recipe, recipe.plan, parameters, ranks=ranks, memory=memory):
        print(f"shoal: {what}", file=sys.stderr)


def _carried_out(
    job: Job, options: Train, placement: Placement | None, world_size: int, began: float
) -> dict[str, Any]:
    """The run, on workers of our own, or as one of the workers that somebody else has started."""
    from shoal.elastic.memory_tier import memory_tier
    from shoal.elastic.restart import with_restarts
    from shoal.launch.local import launch
    from shoal.train.recipe.loop import RunInvocation, train

    launched, settings = job.recipe.launch, job.recipe.checkpoint
    keep = not job.recipe.run.fast_dev_run
    quiet = options.quiet or options.json
    manner = RunInvocation(keep=keep, quiet=quiet, began=began, resume=options.resume)
    if placement or world_size == 1:
        generation = placement.generation if placement else 0
        with _naming_shortened_data(job):
            return _train_here(train, placement, (job, replace(manner, generation=generation)))

    def start(generation: int) -> dict[str, Any]:
        at = replace(manner, generation=generation, memory_root=root, began=began if not generation else time.time())
        grace_period, timeout = launched.grace_period, launched.timeout
        with _naming_shortened_data(job):
            return launch(train, (job, at), nproc=world_size, grace_period=grace_period, timeout=timeout)[0]

    def say(text: str) -> None:
        print(f"shoal: {text}", file=sys.stderr, flush=True)

    with (
        _ended_in_good_order(),
        memory_tier(settings.memory_dir, say, saves_to=_saves_to(job.recipe, options.resume))
        if settings.memory_every.amount and keep
        else nullcontext() as root,
    ):
        return with_restarts(start, most=launched.max_restarts if keep else 0, say=say)


def _saves_to(recipe: Recipe, resume: str) -> str:
    """Where the run will save, or what it would refuse there."""
    from shoal.observe.run_directory import RunDirectory

    wanted = "fresh" if recipe.run.overwrite else resume
    return recipe.checkpoint.dir or str(RunDirectory.preview(recipe, wanted).path / "checkpoints")


@contextmanager
def _naming_shortened_data(job: Job) -> Iterator[None]:
    """Where a process has died: name the file if it was killed for reading beyond the end of one."""
    from shoal.train.recipe.preflight import reject_shortened_data

    try:
        yield
    except RunFailed:
        reject_shortened_data(job)
        raise


def _planned(recipe: Recipe, world_size: int, per_node: int, *, is_quiet: bool) -> Recipe:
    """The recipe with the plan that the planner has chosen."""
    from shoal.train.recipe.auto_plan import planned

    recipe, chosen = planned(recipe, world_size, per_node)
    if not is_quiet:
        seconds, gib = chosen.time.total, chosen.memory.total / 2**30
        words = f"plan: auto is {chosen.plan.brief()}: {seconds * 1e3:,.0f} ms a step and {gib:.1f} GiB predicted"
        print(words, file=sys.stderr)
        if not is_measured_here():
            print("this machine was not measured, and a usual one is assumed: shoal calibrate", file=sys.stderr)
    return recipe


def _note_for_backtest(job: Job, summary: dict[str, Any]) -> None:
    """A row of what was predicted of the run and what was measured, beside its directory, for `shoal backtest`."""
    is_measured = summary["seconds_to_first_step"] is not None  # else it went on from its end, and made no step
    if summary["directory"] and not summary["was_stopped"] and is_measured:
        from shoal.train.recipe.auto_plan import note

        with suppress(Exception):  # no preset describes the machine, the disk is full: the run is done anyway
            note(job.recipe, summary, Path(summary["directory"]).parent / "measured.csv")


@contextmanager
def _ended_in_good_order() -> Iterator[None]:
    """Signals that ask for the end are exceptions, so that whoever has something to tidy up does; while workers run,
    they are passed on to them."""
    from shoal.launch.worker import PASSED_ON

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, end) for number in PASSED_ON if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, objects are made that stay, and are not looked through for garbage. The first step of a tiny model came
    after 5.0 s, and after 5.4 without this (measured, medians of seven in turns, Intel Xeon)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()  # nor are they looked through later, here or in a worker
            gc.enable()


@contextmanager
def _ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process at once. In the middle of an import, Python's own way ends in a confusing traceback."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _train_here(
    train: Callable[..., dict[str, Any]], placement: Placement | None, arguments: tuple[Any, ...]
) -> dict[str, Any]:
    """Be a worker in this process. What breaks in it is told as `launch` tells it of the workers that it starts."""
    from shoal.launch.failure import failure_of

    try:
        return train(placement, None, *arguments)
    except ShoalError:
        raise
    except (Exception, SystemExit) as error:  # `sys.exit(0)` in a model is not the end of a run
        rank, size = (placement.rank, placement.world_size) if placement else (0, 1)
        failure = failure_of(rank, error)
        raise RunFailed(f"rank {rank} of {size} failed: {failure.what}\n{failure.details}", fix=failure.fix) from error


def _show_plan(job: Job, options: Train, out: TextIO) -> None:
    layout = job.recipe.plan.layout
    if options.json:
        print(json.dumps({"recipe": job.recipe.model_dump(mode="json"), "ranks": layout.world_size}), file=out)
    else:
        print(dump_recipe(job.recipe) + "\n" + draw_layout(layout), file=out)


def _keep_and_show(summary: dict[str, Any], options: Train, out: TextIO) -> bool:
    """Whether the summary was written; it is shown in any case."""
    from shoal.observe.run_directory import RunDirectory

    is_kept = True
    if summary["directory"]:
        try:
            RunDirectory(Path(summary["directory"])).write_summary(summary)
        except ShoalError as error:
            print(f"shoal: {error}", file=sys.stderr)
            is_kept = False
    _show(summary, options, out)
    return is_kept


def _show(summary: dict[str, Any], options: Train, out: TextIO) -> None:
    from shoal.observe.metrics import jsonable

    if options.json:
        print(json.dumps(jsonable(summary)), file=out)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="stopped early" if summary["was_stopped"] else "done", show_header=False, title_justify="left")
    for name, value in _rows(summary):
        table.add_row(name, value)
    Console(file=out).print(table)


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary in words; every figure says how it was come by."""
    ranks = f"{summary['ranks']} rank{'s' if summary['ranks'] > 1 else ''}"
    last = f"{summary['loss_last']:.4f} over the last {min(summary['steps'], 10)}"
    unit = summary["unit"]
    held_out = ("held-out loss", "not evaluated" if summary["eval_loss"] is None else f"{summary['eval_loss']:.4f}")
    if summary["seconds_to_first_step"] is None:  # it went on from its end
        made = ("steps", f"{summary['steps']:,}, all of them made before")
        return [made, held_out, ("kept in", summary["directory"] or ""), *_to_go_on(summary)]
    rows = [
        ("steps", f"{summary['steps']:,} ({summary['tokens']:,} {unit})"),
        ("loss", f"{summary['loss_first']:.4f} at the first step, {last}"),
        held_out,
        ("plan", f"{Plan.parse(summary['plan']).brief()} on {ranks}"),
        (
            "speed, measured",
            f"{summary['tokens_per_s']:,.0f} {unit}/s, {summary['step_seconds_median'] * 1e3:.1f} ms a step",
        ),
        ("waiting for data", f"{summary['data_wait_part']:.1%} of the time, measured"),
        *_sent(summary),
        ("memory, measured", f"{summary['memory_gib_max']:.2f} GiB peak on the fullest rank"),
        (
            "time, measured",
            f"{summary['seconds_to_first_step']:.1f} s to the first step, {summary['seconds_training']:.1f} s training",
        ),
        ("kept in", summary["directory"] or "nothing kept"),
    ]
    if summary.get("saves"):
        rows.insert(-1, ("saved", f"step {summary['saved_step']:,}; {_times(summary['saves'], 'save')} held the steps"
                         f" {summary['seconds_held_by_saves']:.2f} s, measured"))  # fmt: skip
    if summary.get("saves_failed"):
        rows.insert(-1, ("NOT saved", f"{_times(summary['saves_failed'], 'save')} failed; see above"))
    rows += _to_go_on(summary)
    if summary["resumed_from"] is not None or summary["restarts"]:
        rows.insert(
            0, ("went on", f"from step {summary['resumed_from'] or 0:,}; {_times(summary['restarts'], 'restart')}")
        )
    if summary["mfu"] is not None:
        rows.insert(5, ("MFU", f"{summary['mfu']:.1%} of the datasheet's peak"))
    if summary["skipped_steps"]:
        rows.insert(1, ("dropped steps", f"{summary['skipped_steps']} with gradients that were not finite"))
    return rows


def _to_go_on(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What to do with a run that was stopped, if there is something to go on from."""
    if not summary["was_stopped"] or summary.get("saved_step") != summary["steps"]:
        return []
    return [("to go on", f"the same command, from step {summary['steps']:,}")]


def _sent(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """How long replicas sent each other something, where that is known."""
    if summary["comm_hidden_part"] is None:
        return []
    text = (
        f"{summary['comm_part']:.1%} of the time, {summary['comm_hidden_part']:.0%} of that hidden, measured;"
        f" {summary['comm_bytes'] / 1e6:,.3f} MB a step from rank 0, counted"
    )
    return [("between replicas", text)]


def _times(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
