"""Measure gradient compression and local SGD on one model and one link: bytes, step time, and loss by samples.

The step time is *predicted* first, from a step without communication and from the link; then it is *measured*.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch.distributed as dist

from shoal.blueprint.plan import Plan
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.config.recipe import Recipe
from shoal.data.loader import evaluation_batches
from shoal.numerics.lr_schedule import lr_factor
from shoal.numerics.optim.build import set_lr
from shoal.predict.estimate.replica_sync import predict, sync_traffic
from shoal.train.build_model import build_for_layout
from shoal.train.optim.build import optimizer_of_run
from shoal.train.recipe.build_run import build_loader, build_run
from shoal.train.recipe.preflight import Job
from shoal.train.recipe.sync_autotune import Estimate, estimate
from shoal.train.run import Run

EVERY = (
    *("", "compress=fp16", "compress=bf16", "compress=int8", "compress=powersgd:4"),
    *(f"sync=local:1 compress={method}" for method in ("powersgd:4", "1bit", "topk:0.01", "randomk:0.1")),
    *("sync=local:8", "sync=diloco:50", "sync=diloco:50 compress=int8"),
)
SMOOTH = 5
"""Steps whose losses are averaged to decide that a loss is reached."""


@dataclass(frozen=True, kw_only=True)
class CompressRequest:
    """The methods to measure, and for how long."""

    methods: tuple[str, ...] = EVERY
    """Words of a plan; one of them is "", uncompressed gradients at every step."""
    steps: int = 50
    """Steps of each method; with local SGD, rounded up to a multiple of its interval."""
    until: float | None = None
    """End a method when its loss has reached this value; `steps` is the limit."""
    evaluate: int = 64
    """Validation samples to evaluate at the end."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of one method."""

    words: str
    predicted: float
    """Seconds of a step, predicted."""
    seconds: float
    """Seconds of a step, measured: the median of steps; with local SGD, the mean over its interval."""
    bytes: float
    """Bytes that rank 0 sends in a step, on average."""
    steps: int
    loss: float
    """The mean over the last tenth of the steps."""
    eval_loss: float | None
    seconds_to_loss: float | None
    """When the loss `until` was reached; None: it was not, or none was set."""
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the first step, and the loss, of every step."""


@dataclass(frozen=True, kw_only=True)
class CompressTrials:
    """The result of one rank."""

    is_main: bool
    replicas: int
    estimate: Estimate
    trials: list[Trial]

    @property
    def plain(self) -> Trial:
        """The baseline: uncompressed gradients at every step."""
        return next(trial for trial in self.trials if not trial.words)


def measure(
    placement: Placement | None, store: dist.Store | None, job: Job, request: CompressRequest
) -> CompressTrials:
    """Measure every method, one after the other, with the same ranks. Every rank calls it."""
    launch = job.recipe.launch
    with World.start(
        placement, device=launch.device, timeout=launch.timeout, store=store, threads=launch.threads
    ) as world:
        estimated = estimate(job, world, request.methods)
        assert estimated is not None
        trials = [_measure_method(job, world, words, estimated, request) for words in request.methods]
        return CompressTrials(is_main=world.is_main, replicas=estimated.replicas, estimate=estimated, trials=trials)


def _measure_method(job: Job, world: World, words: str, estimated: Estimate, request: CompressRequest) -> Trial:
    recipe, method = job.recipe, Plan.parse(words)
    every = method.sync_spec.every if method.sync_spec is not None else 1
    num_steps = -(-request.steps // every) * every
    run = build_run(_with_short_warmup(recipe, method, num_steps), world, sync_traffic(recipe.plan, words))
    run.prepare(build_for_layout(recipe.model, recipe.run.seed))
    run.prepare(optimizer_of_run(run, recipe.optim, lr=recipe.optim.lr, seed=recipe.run.seed))
    curve, num_bytes = _train(run, job, num_steps, request.until)
    run.sync_replicas()
    eval_loss = _evaluate(run, job, request.evaluate)
    run.composed.close()
    losses = [loss for _, loss in curve]
    step = predict(words, estimated.replica, estimated.link, estimated.replicas, estimated.codec)
    reached = next((at for at, loss in _smoothed(curve) if request.until is not None and loss <= request.until), None)
    _report(world, f"{words or 'plain'}: {_per_step(curve, every):.3f} s a step, loss {losses[-1]:.4f}")
    return Trial(
        words=words,
        predicted=step.seconds,
        seconds=_per_step(curve, every),
        bytes=fmean(num_bytes[-every:] or [0]) if every > 1 else median(num_bytes or [0]),
        steps=len(curve),
        loss=fmean(losses[-max(1, len(losses) // 10) :]),
        eval_loss=eval_loss,
        seconds_to_loss=reached,
        curve=curve,
    )


def _with_short_warmup(recipe: Recipe, method: Plan, num_steps: int) -> Recipe:
    """The recipe with uncompressed warm-up steps in at most a quarter of the steps, unless `comm.warmup_steps` is
    set."""
    if recipe.comm.warmup_steps is not None or method.compression is None:
        return recipe
    warmup_steps = min(method.compression.warmup_steps, num_steps // 4)
    return recipe.model_copy(update={"comm": recipe.comm.model_copy(update={"warmup_steps": warmup_steps})})


def _train(run: Run, job: Job, num_steps: int, until: float | None) -> tuple[list[tuple[float, float]], list[int]]:
    recipe = job.recipe
    loader = build_loader(job, run, workers=0)
    curve: list[tuple[float, float]] = []
    sent: list[int] = []
    run.world.barrier()
    start = time.perf_counter()
    try:
        for batch in run.batches(loader):
            factor = lr_factor(recipe.optim.schedule, (len(curve) + 1) / num_steps, final=recipe.optim.final_lr)
            set_lr(run.optimizer, factor)
            loss = float(run.step(batch))
            curve.append((time.perf_counter() - start, loss))
            overlap = run.report.overlap if run.report is not None else None
            if overlap is not None:  # with DDP, not every step is timed
                sent.append(overlap.bytes)
            # The loss is the same on all ranks, so all of them end at the same step.
            if len(curve) == num_steps or (until is not None and _smoothed(curve)[-1][1] <= until):
                return curve, sent
    finally:
        loader.close()
    raise AssertionError("a Loader never ends")


def _per_step(curve: Sequence[tuple[float, float]], every: int) -> float:
    """Seconds of a step, without the first one, which includes allocation and connection setup."""
    seconds = [after - before for (before, _), (after, _) in itertools.pairwise([(0.0, 0.0), *curve])]
    if every > 1 and len(seconds) >= every:
        interval = seconds[-every:]
        is_all = len(seconds) == every
        return (sum(interval) - interval[0] + median(interval)) / every if is_all else fmean(interval)
    return median(seconds[1:] or seconds)


def _smoothed(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [
        (at, fmean(loss for _, loss in curve[max(0, place - SMOOTH + 1) : place + 1]))
        for place, (at, _) in enumerate(curve)
    ]


def _evaluate(run: Run, job: Job, samples: int) -> float | None:
    if not len(job.validation) or not samples:
        return None
    size = run.plan.microbatch_size(job.recipe.data.global_batch) * run.degree
    batches: Any = evaluation_batches(job.validation, batch=size, coordinate=run.coordinate, degree=run.degree)
    return run.evaluate(itertools.islice(batches, max(1, samples // size)))


def _report(world: World, text: str) -> None:
    if world.is_main:
        print(text, file=sys.stderr, flush=True)
