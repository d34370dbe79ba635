"""The loop: a recipe from its first step to its summary, on one rank. Straight-line: build, train, evaluate, report."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from torch.distributed import Store

from shoal.blueprint.recipe import Recipe
from shoal.comm.environment import Placement
from shoal.comm.world import World
from shoal.data.loading import Loader, evaluation_batches
from shoal.errors import ShoalError
from shoal.numerics.optim import build_optimizer, set_lr
from shoal.numerics.schedule import lr_factor, scaled_lr
from shoal.observe.directory import RunDirectory
from shoal.observe.progress import ProgressLine, Quiet, progress_line
from shoal.train.build import build_to_lay_out, describe
from shoal.train.job import Job, steps_of, units
from shoal.train.meter import Meter
from shoal.train.run import Run


def train(
    placement: Placement | None, store: Store | None, job: Job, keep: bool, quiet: bool, began: float
) -> dict[str, Any]:
    """Train on this rank; returns the summary of the run, the same on every rank. `keep`: in a run directory."""
    recipe = job.recipe
    launch, optim, settings = recipe.launch, recipe.optim, recipe.run
    world = World.start(placement, device=launch.device, timeout=launch.timeout, store=store, threads=launch.threads)
    with Run(
        recipe.plan,
        seed=settings.seed,
        clip=optim.clip,
        on_nan=settings.on_nan,
        deterministic=settings.deterministic,
        loss_scale=optim.loss_scale,
        loss_scale_window=optim.loss_scale_window,
        bucket_mb=settings.bucket_mb,
        find_unused=settings.find_unused,
        compile=settings.compile,
        attention=settings.attention,
        fused_loss={"auto": None, "fused": True, "plain": False}[settings.loss],
        fp8=settings.fp8,
        fp8_narrow=settings.fp8_narrow,
        fp8_head=settings.fp8_head,
        world=world,
    ) as run:
        console = Console(stderr=True)
        unit = "tok" if job.training.tokens_per_sample > 1 else "sample"
        line = progress_line(console, quiet=quiet, unit=unit) if world.is_main else Quiet(Console(quiet=True))
        model = build_to_lay_out(recipe.model, settings.seed)
        description = describe(model)
        run.prepare(model)
        lr = scaled_lr(optim.lr, batch=recipe.data.batch, tuned_for_batch=optim.scale_lr_from_batch)
        run.prepare(build_optimizer(run.parameters, optim, lr=lr, seed=settings.seed, offload=run.plan.offload))
        directory = _claim_directory(world, recipe) if keep else None
        meter = Meter(run, job, description, directory, began=began)
        line.note(_headline(run, job, lr))
        loader = Loader(
            job.training,
            seed=settings.seed,
            batch=recipe.data.batch,
            coordinate=run.coordinate,
            degree=run.degree,
            workers=recipe.data.workers,
            prefetch=recipe.data.prefetch,
            pin=world.device.type == "cuda",
        )
        try:
            with _asked_to_stop() as asked:
                was_stopped = _steps(run, job, loader, meter, line, asked)
            run.settle()
            meter.settle()
            if not was_stopped:  # whoever asked for the end does not want to wait for an evaluation
                meter.evaluated(_evaluate(run, job))
        finally:
            loader.close()
            try:
                meter.close()
            finally:
                line.close()
        return meter.summary(was_stopped=was_stopped)


def _claim_directory(world: World, recipe: Recipe) -> Path:
    """Made by the main rank, now that all have met and nothing can be wrong any more; refused on all ranks alike."""
    outcome: Path | ShoalError | None = None
    if world.is_main:
        try:
            outcome = RunDirectory.claim(recipe).path
        except ShoalError as error:
            outcome = error
    outcome = world.all_gather_object(outcome)[0]
    if isinstance(outcome, ShoalError):
        raise outcome
    assert outcome is not None
    return outcome


def _steps(run: Run, job: Job, loader: Loader, meter: Meter, line: ProgressLine, asked: list[int]) -> bool:
    """Optimizer steps until the duration is reached, or until any rank was asked to stop: then True, on every rank."""
    settings = job.recipe.run
    num_steps, seconds = steps_of(job), settings.duration.seconds or 0.0
    evaluate_every = settings.evaluate_every.steps(**units(job.recipe, job.training))
    start = time.monotonic()
    elapsed, was_told = 0.0, False
    for batch in run.batches(loader):
        done = (run.steps_done + 1) / num_steps if num_steps else min(elapsed / seconds, 1.0)
        set_lr(run.optimizer, _lr_factor(job, run.steps_done + 1, done))
        run.step(batch)
        meter.stepped(loader, line, done)
        # One clock, rank 0's, and one answer to "was anyone asked to stop": both travel with the step's token count.
        elapsed = run.agreed.get("seconds", 0.0)
        is_over = run.steps_done >= num_steps if num_steps else elapsed >= seconds
        if is_over or run.agreed.get("stop", 0.0):
            return not is_over
        run.signals = {"stop": float(bool(asked)), "seconds": time.monotonic() - start if run.world.is_main else 0.0}
        if asked and not was_told:
            was_told = True
            line.say("stopping after the next step; Ctrl-C again ends at once")
        if evaluate_every and run.steps_done % evaluate_every == 0:
            run.settle()
            meter.settle()
            meter.evaluated(_evaluate(run, job))
            if meter.eval_loss is not None:
                line.note(f"step {run.steps_done}: held-out loss {meter.eval_loss:.4f}")
    raise AssertionError("a Loader never ends")


def _evaluate(run: Run, job: Job) -> float | None:
    """The loss over all held-out samples; None if there are none."""
    if not len(job.held_out):
        return None
    size = run.plan.microbatch_size(job.recipe.data.batch) * run.degree
    batches: Iterator[Any] = evaluation_batches(job.held_out, batch=size, coordinate=run.coordinate, degree=run.degree)
    return run.evaluate(itertools.islice(batches, 2) if job.recipe.run.fast_dev_run else batches)


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


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """A list that holds a signal once one came (Ctrl-C, SIGTERM); a second Ctrl-C ends the process at once."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _headline(run: Run, job: Job, lr: float) -> str:
    recipe = job.recipe
    parameters = run.composed.num_parameters
    model = " ".join(filter(None, (recipe.model.name, recipe.model.preset)))
    lines = [
        f"model  {model}: {parameters:,} parameters, {run.plan.precision}",
        f"data   {job.training.describe()}",
        f"plan   {run.plan.brief()}",
        f"step   {recipe.data.batch} samples = {_counted(run.degree, 'data rank')}"
        f" x {_counted(run.plan.num_microbatches(recipe.data.batch), 'microbatch', 'es')}"
        f" x {_counted(run.plan.microbatch_size(recipe.data.batch), 'sample')}",
    ]
    if recipe.optim.scale_lr_from_batch:
        lines.append(
            f"lr     {recipe.optim.lr:g} x {recipe.data.batch} / {recipe.optim.scale_lr_from_batch} = {lr:g}"
            " (linear scaling rule)"
        )
    if run.world.size > 1:
        lines += [" " * 7 + line for line in run.plan.layout.draw(devices_per_node=run.world.local_size).splitlines()]
    return "\n".join(lines)


def _counted(number: int, thing: str, plural: str = "s") -> str:
    return f"{number} {thing}{'' if number == 1 else plural}"
