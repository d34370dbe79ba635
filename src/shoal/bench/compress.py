"""Ways for replicas to meet, tried on one model and one link: bytes, seconds of a step, and the loss after as many
samples. What a step will take is *predicted* first, from a step without meeting and from the link; then *measured*."""

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
from shoal.comm.rendezvous.environment import Placement
from shoal.comm.world import World
from shoal.config.recipe import Recipe
from shoal.data.loader import evaluation_batches
from shoal.numerics.lr_schedule import lr_factor
from shoal.numerics.optim.build import build_optimizer, set_lr
from shoal.predict.estimate.replica_sync import predict, sync_traffic
from shoal.train.build_model import build_for_layout
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
"""Losses of so many steps are averaged before one says that a loss was reached."""


@dataclass(frozen=True, kw_only=True)
class CompressRequest:
    """What to try."""

    ways: tuple[str, ...] = EVERY
    """Words of a plan; one of them is "", gradients as they are."""
    steps: int = 50
    """Of each way; of islands at least as many as lie between two meetings, and a multiple of them."""
    until: float | None = None
    """End a way when its loss has come down to this; `steps` is the most that it gets."""
    evaluate: int = 64
    """Held-out samples that are scored in the end."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One way."""

    words: str
    predicted: float
    """Seconds of a step."""
    seconds: float
    """The same, measured: the median of single steps; of islands the mean between two meetings."""
    bytes: float
    """Sent by rank 0 in a step, on average."""
    steps: int
    loss: float
    """The mean over the last tenth of the steps."""
    eval_loss: float | None
    seconds_to_loss: float | None
    """When the wanted loss was reached; None: it was not, or none was wanted."""
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the first step, and the loss, of every step."""


@dataclass(frozen=True, kw_only=True)
class CompressTrials:
    """What one rank came to."""

    is_main: bool
    replicas: int
    weighed: Estimate
    tried: list[Trial]

    @property
    def plain(self) -> Trial:
        """Gradients as they are, which the others are held against."""
        return next(tried for tried in self.tried if not tried.words)


def measure(placement: Placement | None, store: dist.Store | None, job: Job, ask: CompressRequest) -> CompressTrials:
    """Try every way, one after the other, with the same ranks; every rank calls it."""
    launch = job.recipe.launch
    with World.start(
        placement, device=launch.device, timeout=launch.timeout, store=store, threads=launch.threads
    ) as world:
        weighed = estimate(job, world, ask.ways)
        assert weighed is not None
        tried = [_try(job, world, words, weighed, ask) for words in ask.ways]
        return CompressTrials(is_main=world.is_main, replicas=weighed.replicas, weighed=weighed, tried=tried)


def _try(job: Job, world: World, words: str, weighed: Estimate, ask: CompressRequest) -> Trial:
    recipe, said = job.recipe, Plan.parse(words)
    every = said.synchrony.every if said.synchrony is not None else 1
    num_steps = -(-ask.steps // every) * every
    run = build_run(_with_few_exact_steps(recipe, said, num_steps), world, sync_traffic(recipe.plan, words))
    run.prepare(build_for_layout(recipe.model, recipe.run.seed))
    run.prepare(build_optimizer(run.parameters, recipe.optim, lr=recipe.optim.lr, seed=recipe.run.seed))
    curve, num_bytes = _trained(run, job, num_steps, ask.until)
    run.meet()
    eval_loss = _evaluated(run, job, ask.evaluate)
    run.composed.close()
    losses = [loss for _, loss in curve]
    step = predict(words, weighed.replica, weighed.link, weighed.replicas, weighed.codec)
    reached = next((at for at, loss in _smoothed(curve) if ask.until is not None and loss <= ask.until), None)
    _tell(world, f"{words or 'as they are'}: {_per_step(curve, every):.3f} s a step, loss {losses[-1]:.4f}")
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


def _with_few_exact_steps(recipe: Recipe, said: Plan, num_steps: int) -> Recipe:
    """Unless somebody says how many, a quarter of the steps at most send gradients as they are: most are to be what
    they are called."""
    if recipe.comm.warmup_steps is not None or said.compression is None:
        return recipe
    exact = min(said.compression.warmup_steps, num_steps // 4)
    return recipe.model_copy(update={"comm": recipe.comm.model_copy(update={"warmup_steps": exact})})


def _trained(run: Run, job: Job, num_steps: int, until: float | None) -> tuple[list[tuple[float, float]], list[int]]:
    recipe = job.recipe
    loader = build_loader(job, run, workers=0)
    curve: list[tuple[float, float]] = []
    sent: list[int] = []
    run.world.barrier()
    began = time.perf_counter()
    try:
        for batch in run.batches(loader):
            factor = lr_factor(recipe.optim.schedule, (len(curve) + 1) / num_steps, final=recipe.optim.final_lr)
            set_lr(run.optimizer, factor)
            loss = float(run.step(batch))
            curve.append((time.perf_counter() - began, loss))
            hidden = run.report.hidden if run.report is not None else None
            if hidden is not None:  # of DDP, not every step is timed
                sent.append(hidden.bytes)
            # The loss is the same on all ranks, and so is what follows from it.
            if len(curve) == num_steps or (until is not None and _smoothed(curve)[-1][1] <= until):
                return curve, sent
    finally:
        loader.close()
    raise AssertionError("a Loader never ends")


def _per_step(curve: Sequence[tuple[float, float]], every: int) -> float:
    """Without the first step, which pays for memory and connections, where there are others."""
    took = [after - before for (before, _), (after, _) in itertools.pairwise([(0.0, 0.0), *curve])]
    if every > 1 and len(took) >= every:
        settled = took[-every:]
        return (sum(settled) - settled[0] + median(settled)) / every if len(took) == every else fmean(settled)
    return median(took[1:] or took)


def _smoothed(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [
        (at, fmean(loss for _, loss in curve[max(0, place - SMOOTH + 1) : place + 1]))
        for place, (at, _) in enumerate(curve)
    ]


def _evaluated(run: Run, job: Job, samples: int) -> float | None:
    if not len(job.validation) or not samples:
        return None
    size = run.plan.microbatch_size(job.recipe.data.global_batch) * run.degree
    batches: Any = evaluation_batches(job.validation, batch=size, coordinate=run.coordinate, degree=run.degree)
    return run.evaluate(itertools.islice(batches, max(1, samples // size)))


def _tell(world: World, text: str) -> None:
    if world.is_main:
        print(text, file=sys.stderr, flush=True)
