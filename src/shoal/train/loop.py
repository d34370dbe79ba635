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

from shoal.comm.environment import Placement
from shoal.comm.world import World
from shoal.data.loading import Loader, evaluation_batches
from shoal.numerics.gradients import LossScale
from shoal.numerics.init import initialise
from shoal.numerics.optim import build_optimizer, set_lr
from shoal.numerics.schedule import lr_factor, scaled_lr
from shoal.observe.progress import ProgressLine, Quiet, progress_line
from shoal.train.build import build_model, describe
from shoal.train.job import Job, steps_of, units
from shoal.train.meter import Meter
from shoal.train.run import Run


def train(
    placement: Placement | None, store: Store | None, job: Job, directory: Path | None, quiet: bool, began: float
) -> dict[str, Any]:
    """Train on this rank; returns the summary of the run, which is the same on every rank but for its memory."""
    recipe = job.recipe
    launch, optim, settings = recipe.launch, recipe.optim, recipe.run
    world = World.start(placement, device=launch.device, timeout=launch.timeout, store=store, threads=launch.threads)
    with Run(
        recipe.plan,
        seed=settings.seed,
        clip=optim.clip,
        on_nan=settings.on_nan,
        deterministic=settings.deterministic,
        loss_scale=LossScale(optim.loss_scale, optim.loss_scale_window),
        bucket_mb=settings.bucket_mb,
        world=world,
    ) as run:
        console = Console(stderr=True)
        line = progress_line(console, quiet=quiet) if world.is_main else Quiet(Console(quiet=True))
        model = build_model(recipe.model)
        description = describe(model)
        initialise(model, settings.seed)
        run.prepare(model.to(world.device))
        lr = scaled_lr(optim.lr, batch=recipe.data.batch, tuned_for_batch=optim.scale_lr_from_batch)
        run.prepare(build_optimizer(run.module.parameters(), optim, lr=lr))
        directory = world.all_gather_object(directory)[0]
        meter = Meter(run, job, description, directory, began=began)
        if not quiet:
            line.say(_headline(run, job, lr))
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
                _steps(run, job, loader, meter, line, asked)
            meter.evaluated(_evaluate(run, job))
        finally:
            line.close()
            loader.close()
            meter.close()
        return meter.summary(was_stopped=bool(asked))


def _steps(run: Run, job: Job, loader: Loader, meter: Meter, line: ProgressLine, asked: list[int]) -> None:
    """Optimizer steps until the duration is reached, or until any rank was asked to stop."""
    settings, optim = job.recipe.run, job.recipe.optim
    num_steps, seconds = steps_of(job), settings.duration.seconds
    evaluate_every = settings.evaluate_every.steps(**units(job))
    warmup = _warmup_part(job, num_steps)
    start = time.monotonic()
    elapsed = 0.0
    for batch in run.batches(loader):
        done = (run.steps_done + 1) / num_steps if num_steps else min(elapsed / (seconds or 1.0), 1.0)
        set_lr(run.optimizer, lr_factor(optim.schedule, done, warmup=warmup, final=optim.final_lr))
        run.step(batch)
        meter.stepped(loader, line, done)
        # One clock, rank 0's, and one answer to "was anyone asked to stop": both travel with the step's token count.
        elapsed = run.agreed.get("seconds", 0.0)
        is_over = run.steps_done >= num_steps if num_steps else elapsed >= (seconds or 0.0)
        if is_over or run.agreed.get("stop", 0.0):
            return
        run.signals = {"stop": float(bool(asked)), "seconds": time.monotonic() - start if run.world.is_main else 0.0}
        if evaluate_every and run.steps_done % evaluate_every == 0:
            meter.evaluated(_evaluate(run, job))


def _evaluate(run: Run, job: Job) -> float | None:
    """The loss over all held-out samples; None if there are none."""
    if not len(job.held_out):
        return None
    size = run.plan.microbatch_size(job.recipe.data.batch) * run.degree
    batches: Iterator[Any] = evaluation_batches(job.held_out, batch=size, coordinate=run.coordinate, degree=run.degree)
    return run.evaluate(itertools.islice(batches, 2) if job.recipe.run.fast_dev_run else batches)


def _warmup_part(job: Job, num_steps: int | None) -> float:
    """Warm-up as a part of the run, in steps or in seconds as the run itself is."""
    warmup, duration = job.recipe.optim.warmup, job.recipe.run.duration
    if num_steps:
        steps = warmup.steps(**units(job))
        return min((steps if steps is not None else 0) / num_steps, 1.0)
    return min((warmup.seconds or 0.0) / (duration.seconds or 1.0), 1.0)


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
    parameters = sum(parameter.numel() for parameter in run.module.parameters())
    microbatches = run.plan.num_microbatches(recipe.data.batch)
    lines = [
        f"model  {recipe.model.name} {recipe.model.preset or ''}: {parameters:,} parameters, {run.plan.precision}",
        f"data   {job.training.describe()}",
        f"plan   {run.plan.layout.draw()}",
        f"step   {recipe.data.batch} samples = {run.degree} data ranks x {microbatches} microbatches"
        f" x {run.plan.microbatch_size(recipe.data.batch)}",
    ]
    if recipe.optim.scale_lr_from_batch:
        lines.append(
            f"lr     {recipe.optim.lr:g} x {recipe.data.batch} / {recipe.optim.scale_lr_from_batch} = {lr:g}"
            " (linear scaling rule)"
        )
    return "\n".join(lines)
