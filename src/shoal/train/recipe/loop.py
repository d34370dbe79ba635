"""The loop: a recipe from its first step to its summary, on one rank. Straight-line: build, train, evaluate, report."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed import Store

from shoal.blueprint.layout_drawing import draw_layout
from shoal.checkpoint.storage.manifest import Manifest
from shoal.comm.all_or_none import on_main
from shoal.comm.rendezvous.environment import Placement
from shoal.comm.world import World
from shoal.config.recipe import Recipe
from shoal.data.loader import Loader, evaluation_batches
from shoal.errors import ShoalError
from shoal.numerics.lr_schedule import lr_factor, scaled_lr
from shoal.numerics.optim.build import build_optimizer, set_lr
from shoal.numerics.precision import slow_here
from shoal.observe.progress import ProgressLine, Quiet, progress_line
from shoal.observe.run_directory import RunDirectory
from shoal.train.build_model import build_for_layout, describe
from shoal.train.recipe.autosave import Autosaver, refuse_bad_start, start_from
from shoal.train.recipe.build_run import build_loader, build_run
from shoal.train.recipe.fault_injection import inject_faults
from shoal.train.recipe.preflight import Job, reject_unlike_data, steps_of, units
from shoal.train.recipe.step_metrics import StepMetrics
from shoal.train.recipe.stop_signals import StopRequest, stop_on_signals
from shoal.train.recipe.sync_autotune import advice, algorithm_chosen, bucket_chosen, resolve_sync
from shoal.train.run import Run


@dataclass(frozen=True, kw_only=True)
class RunInvocation:
    """How a run is carried out, beside what its recipe says."""

    keep: bool = True
    """In a run directory, with checkpoints."""
    quiet: bool = False
    began: float
    """When whoever asked for the run did so."""
    resume: str = "auto"
    """Where to go on from: auto, fresh, latest, or a step."""
    generation: int = 0
    """How often the workers of this run were started again."""
    memory_root: Path | None = None
    """A folder in shared memory that outlives the workers."""


def train(placement: Placement | None, store: Store | None, job: Job, manner: RunInvocation) -> dict[str, Any]:
    """Train on this rank; returns the summary of the run, the same on every rank."""
    launch = job.recipe.launch
    world = World.start(placement, device=launch.device, timeout=launch.timeout, store=store, threads=launch.threads)
    reject_unlike_data(world, job)
    job, way_chosen = resolve_sync(job, world)
    recipe = job.recipe
    optim, settings = recipe.optim, recipe.run
    with build_run(recipe, world) as run:
        run.replica_check.every = settings.check_replicas.steps(**units(recipe, job.training)) or 0
        console = Console(stderr=True)
        unit = "tok" if job.training.tokens_per_sample is not None else "sample"
        line = progress_line(console, quiet=manner.quiet, unit=unit) if world.is_main else Quiet(Console(quiet=True))
        model = build_for_layout(recipe.model, settings.seed)
        description = describe(model)
        run.prepare(model)
        lr = scaled_lr(optim.lr, batch=recipe.data.global_batch, tuned_for_batch=optim.scale_lr_from_batch)
        run.prepare(build_optimizer(run.parameters, optim, lr=lr, seed=settings.seed, offload=run.plan.offload))
        inject_faults(run, manner.generation)
        directory, keeper, manifest = _kept(run, job, manner, line) if manner.keep else (None, None, None)
        if keeper is None:
            _start(run, job, line)
        known = manifest.state if manifest is not None else {}
        path = directory.path if directory is not None else None
        told_before = directory.evaluation if directory is not None else None
        history = known.get("history")
        meter = StepMetrics(
            run, job, description, path, began=manner.began, history=history, evaluation=told_before, say=line.say
        )
        if keeper is not None:
            keeper.facts = lambda: {"history": meter.history()}
        chosen = [text for text in (way_chosen, algorithm_chosen(run), bucket_chosen(run)) if text]
        told = [f"meet   {text}" for text in (*chosen, advice(recipe)) if text]
        slow = slow_here(run.precision, run.device) if world.is_main else None
        told += [f"slow   {slow}"] if slow else []
        line.note("\n".join([_headline(run, job, lr), *told]))
        if manifest is not None:
            line.note(f"resume from step {manifest.step}, which {_counted(int(known.get('ranks', 1)), 'rank')} saved")
        loader = build_loader(job, run, workers=recipe.data.workers)
        try:
            with stop_on_signals(line) as asked:
                was_stopped = _steps(run, job, loader, meter, line, asked, keeper)
                run.settle()
                meter.settle()
                if not was_stopped:
                    run.meet()
                if keeper is not None:
                    keeper.save_end()  # an evaluation may take long, and what was trained is not to be lost with it
                if not was_stopped:  # whoever asked for the end does not want to wait for an evaluation
                    was_stopped = not _score(run, job, meter, line, asked)
                if keeper is not None:
                    keeper.end()
        finally:
            loader.close()
            try:
                meter.close()
            finally:
                line.close()
                if directory is not None and keeper is not None:
                    keeper.release()
                    directory.close()
        return {
            **meter.summary(was_stopped=was_stopped),
            **(keeper.summary() if keeper is not None else {}),
            "resumed_from": manifest.step if manifest is not None else None,
            "restarts": manner.generation,
            "chosen": chosen,
        }


def _kept(
    run: Run, job: Job, manner: RunInvocation, line: ProgressLine
) -> tuple[RunDirectory, Autosaver, Manifest | None]:
    """The directory of the run, what keeps it, and the step that it goes on from, if there is one."""
    wanted = "fresh" if job.recipe.run.overwrite else manner.resume
    resume = wanted if manner.generation == 0 else "auto"
    if job.recipe.run.start_from is not None:
        refuse_bad_start(run, job.recipe, is_fresh=resume == "fresh")  # before anything is removed
    directory = _claim_directory(run.world, job.recipe, resume)
    keeper: Autosaver | None = None
    try:
        keeper = Autosaver.of(run, job, directory=directory.path, memory_root=manner.memory_root, say=line.say)
        keeper.refuse_too_little_room()
        keeper.claim_store()
        is_elsewhere = job.recipe.checkpoint.dir is not None  # where steps may be although the directory is new
        goes_on = resume not in ("auto", "fresh") or (resume == "auto" and (directory.resumes or is_elsewhere))
        manifest = keeper.go_on(resume) if goes_on else None
        num_steps = steps_of(job)
        if num_steps is not None and run.steps_done > num_steps:
            raise ShoalError(
                f"the run in {str(directory.path)!r} has made {run.steps_done:,} steps, and {num_steps:,} are wanted",
                fix=f"--run.duration longer than {run.steps_done}step, or --resume STEP to go on from an earlier one",
            )
        if manifest is None:
            _start(run, job, line)
        if not goes_on:
            keeper.reset()
        # Nothing speaks against it any more. Nobody opens a file of metrics before this.
        directory.evaluation = on_main(
            run.world,
            lambda: _begin(directory, job, run.steps_done),
            failed=f"the run directory {str(directory.path)!r} cannot be written",
            fix="--run.dir SOMEWHERE that you may write to",
        )
    except BaseException:
        if keeper is not None:
            keeper.release()
        directory.give_up()
        raise
    return directory, keeper, manifest


def _start(run: Run, job: Job, line: ProgressLine) -> None:
    """With the weights of another run, if the recipe says so."""
    where = job.recipe.run.start_from
    if where is not None:
        line.note(f"start  with the weights of step {start_from(run, where)} of {where}")


def _begin(directory: RunDirectory, job: Job, steps_done: int) -> tuple[int, float] | None:
    """Returns the last evaluation of what the run goes on after."""
    directory.begin(job.recipe)
    # Its end, if it is there already, is told once more.
    directory.drop_metrics_after(steps_done, and_its_evaluation=steps_done == steps_of(job))
    return directory.last_evaluation()


def _claim_directory(world: World, recipe: Recipe, resume: str) -> RunDirectory:
    """Made by the main rank, now that all have met and nothing can be wrong any more; refused on all ranks alike."""
    own: list[RunDirectory] = []

    def claim() -> tuple[Path, bool]:
        own.append(RunDirectory.claim(recipe, resume))
        return own[0].path, own[0].resumes

    fix = "--run.dir SOMEWHERE that you may write to"
    path, goes_on = on_main(world, claim, failed="the run has no directory", fix=fix)
    return own[0] if own else RunDirectory(path, resumes=goes_on)


def _steps(
    run: Run,
    job: Job,
    loader: Loader,
    meter: StepMetrics,
    line: ProgressLine,
    asked: StopRequest,
    keeper: Autosaver | None,
) -> bool:
    """Optimizer steps until the duration is reached, or until any rank was asked to stop: then True, on every rank."""
    settings = job.recipe.run
    num_steps, seconds = steps_of(job), settings.duration.seconds or 0.0
    evaluate_every = settings.evaluate_every.steps(**units(job.recipe, job.training)) or 0

    def stopped_evaluating() -> bool:
        """Evaluate, if it is time for that and was not done; whether that was stopped before its end."""
        done = run.steps_done
        if not evaluate_every or not done or done % evaluate_every or meter.evaluated_at == done:
            return False
        is_scored = _score(run, job, meter, line, asked)
        if is_scored and meter.eval_loss is not None:
            line.note(f"step {done}: held-out loss {meter.eval_loss:.4f}")
        return not is_scored

    start = time.monotonic() - meter.seconds_before
    elapsed = meter.seconds_before
    if run.steps_done >= num_steps if num_steps else elapsed >= seconds:  # it went on from its end
        return False
    if stopped_evaluating():  # it goes on from a step after which it was to be evaluated, and was stopped
        return True
    asked.is_first_step = True
    for batch in run.batches(loader):
        done = (run.steps_done + 1) / num_steps if num_steps else min(elapsed / seconds, 1.0)
        set_lr(run.optimizer, _lr_factor(job, run.steps_done + 1, done))
        with _noting_step(run.steps_done + 1):
            run.step(batch)
        asked.is_first_step = False
        meter.stepped(loader, line, done)
        # One clock, rank 0's, and one answer to "was anyone asked to stop": both travel with the step's count or loss.
        elapsed = run.agreed.get("seconds", meter.seconds_before)
        is_over = run.steps_done >= num_steps if num_steps else elapsed >= seconds
        if is_over or run.agreed.get("stop", 0.0):
            return not is_over
        if stopped_evaluating():
            return True
        asked.answer()
        if keeper is not None:
            keeper.stepped(is_wanted=bool(run.agreed.get("save", 0.0)))
        clock = _clock_of_main(start, keeper) if run.world.is_main else _NO_CLOCK
        run.signals = {"stop": float(bool(asked)), **clock}
    raise AssertionError("a Loader never ends")


@contextmanager
def _noting_step(number: int) -> Iterator[None]:
    """Add to an exception in which step it was raised: the same one in the same step again is no accident."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in step {number}")
        raise


_NO_CLOCK = {"seconds": 0.0, "save": 0.0}


def _clock_of_main(start: float, keeper: Autosaver | None) -> dict[str, float]:
    """What the clock of the main rank says to all."""
    return {"seconds": time.monotonic() - start, "save": float(keeper is not None and keeper.wants)}


def _score(run: Run, job: Job, meter: StepMetrics, line: ProgressLine, asked: StopRequest) -> bool:
    """Score all held-out samples, if there are any; False, on every rank, if one was asked to stop before the end."""
    run.settle()
    meter.settle()
    total = len(job.held_out)
    if not total:
        return True
    size = run.plan.microbatch_size(job.recipe.data.global_batch) * run.degree
    batches: Iterator[Any] = evaluation_batches(job.held_out, batch=size, coordinate=run.coordinate, degree=run.degree)
    if job.recipe.run.fast_dev_run:
        batches, total = itertools.islice(batches, 2), min(total, 2 * size)

    def shown() -> Iterator[Any]:
        for number, batch in enumerate(batches):  # each is taken when the one before it was scored
            line.evaluating(number * size, total)
            yield batch

    loss = run.evaluate_unless(lambda: bool(asked), shown())
    if loss is None:
        line.say("stopping without the rest of the evaluation; Ctrl-C again ends at once")
        return False
    meter.evaluated(loss)
    return True


def _lr_factor(job: Job, step: int, done: float) -> float:
    """The learning rate of a step, counted from 1, as a part of its peak; `done` is how far the run is after it."""
    optim, duration, num_steps = job.recipe.optim, job.recipe.run.duration, steps_of(job)
    warmup_steps = optim.warmup.steps(**units(job.recipe, job.training))
    if num_steps is not None:
        return lr_factor(optim.schedule, done, warmup=(warmup_steps or 0) / num_steps, final=optim.final_lr)
    done = max(done, 1e-3)  # the clock stands at zero in the first step, which is not to be wasted on a rate of zero
    if warmup_steps is None:
        part = (optim.warmup.seconds or 0.0) / (duration.seconds or 1.0)
        return lr_factor(optim.schedule, done, warmup=part, final=optim.final_lr)
    # Steps within a run by the clock: which part of it they will be is not known, so they come on top.
    ramp = min(step / warmup_steps, 1.0) if warmup_steps else 1.0
    return ramp * lr_factor(optim.schedule, done, final=optim.final_lr)


def _headline(run: Run, job: Job, lr: float) -> str:
    recipe = job.recipe
    parameters = run.composed.num_parameters
    model = " ".join(filter(None, (recipe.model.name, recipe.model.preset)))
    lines = [
        f"model  {model}: {parameters:,} parameters, {run.plan.precision}",
        f"data   {job.training.describe()}",
        f"plan   {run.plan.brief()}",
        f"step   {recipe.data.global_batch} samples = {_counted(run.degree, 'data rank')}"
        f" x {_counted(run.plan.num_microbatches(recipe.data.global_batch), 'microbatch', 'es')}"
        f" x {_counted(run.plan.microbatch_size(recipe.data.global_batch), 'sample')}",
    ]
    if recipe.run.compile:
        lines.append("first  the first step compiles the model, which takes a while")
    if recipe.optim.scale_lr_from_batch:
        lines.append(
            f"lr     {recipe.optim.lr:g} x {recipe.data.global_batch} / {recipe.optim.scale_lr_from_batch} = {lr:g}"
            " (linear scaling rule)"
        )
    if run.world.size > 1:
        lines += [" " * 7 + line for line in draw_layout(run.plan.layout, run.world.local_size).splitlines()]
    return "\n".join(lines)


def _counted(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"
