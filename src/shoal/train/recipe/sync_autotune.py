"""`sync=auto`: choose how replicas synchronise from the measured step time and the measured link.

Every rank makes a few steps on its own replica, without communication, on a copy of the model that is thrown away. Then
all ranks measure the link and the codecs together, and `shoal.predict.estimate.replica_sync` chooses.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from statistics import median

from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.unsupported import check_unsupported
from shoal.comm.replicas.link_probe import codec_seconds, link_of
from shoal.comm.replicas.transport import Transport
from shoal.comm.world import World
from shoal.config.checks.no_effect import without_no_effect
from shoal.config.recipe import Recipe
from shoal.numerics.local_tensor import to_local
from shoal.predict.estimate.replica_sync import WAYS, Link, ReplicaShape, Step, choose, sync_traffic
from shoal.train.build_model import build_for_layout
from shoal.train.optim.build import optimizer_of_run
from shoal.train.recipe.build_run import build_loader, build_run
from shoal.train.recipe.preflight import Job
from shoal.train.run import Run

NEVER = "diloco:1000000000"
"""A `sync` that sends a few bytes in the trial steps. `local` would send 4 KB in each, to correct its step length."""
TRIALS = 3
"""Timed steps, after one that is not timed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The measurements, and the predicted step time of every way to synchronise."""

    replicas: int
    replica: ReplicaShape
    link: Link
    codec: dict[str, float]
    chosen: Step
    steps: list[Step]
    why: str


def estimate(job: Job, world: World, ways: tuple[str, ...] = WAYS) -> Estimate | None:
    """Measure, and choose. Every rank calls it and gets the same result. None: there is one replica."""
    plan = job.recipe.plan
    if plan.layout.dp_replicate == 1:
        return None
    ways = tuple(words for words in ways if _can_be_run(plan, words))
    without_warmup = job.recipe.model_copy(update={"comm": job.recipe.comm.model_copy(update={"warmup_steps": 0})})
    trial = build_run(without_warmup, world, replace(plan, sync=NEVER, compress=None))
    compute, shapes, width = _replica(job, trial)
    transport = Transport(trial.mesh.new_group("dp_replicate"), trial.mesh.comm_device)
    link = link_of(transport)
    compute -= min(2 * link.latency, compute / 2)  # of the messages of each trial step, which a prediction adds
    methods = {Plan.parse(words).compress for words in ways} - {None}
    codec = codec_seconds(transport, sorted(method for method in methods if method is not None), link)
    trial.composed.close()
    del trial
    gc.collect()
    measured = (ReplicaShape(compute, shapes, width), link, codec)
    # Rank 0's numbers decide on every rank: other ranks may hold other shards.
    replica, link, codec = world.all_gather_object(measured, kinds=(ReplicaShape, Link))[0]
    chosen, steps, why = choose(replica, link, plan.layout.dp_replicate, codec, ways)
    return Estimate(plan.layout.dp_replicate, replica, link, codec, chosen, steps, why)


def _can_be_run(plan: Plan, words: str) -> bool:
    return not any(check_unsupported(sync_traffic(plan, words)))


def resolve_sync(job: Job, world: World) -> tuple[Job, str]:
    """Replace `sync=auto` in the job's plan; returns the job and the reason in words."""
    plan = job.recipe.plan
    if plan.sync != "auto":
        return job, ""
    estimated = estimate(job, world)
    words = "" if estimated is None else estimated.chosen.words
    chosen = sync_traffic(plan, words)
    why = "there is one replica" if estimated is None else f"{estimated.why} (predicted from measurements)"
    update = {"plan": chosen, "comm": without_no_effect(job.recipe.comm, chosen)}
    resolved = replace(job, recipe=job.recipe.model_copy(update=update))
    return resolved, f"sync=auto is {words or 'gradients at every step'}: {why}"


def advice(recipe: Recipe) -> str:
    """A suggestion where AdamW gets gradients of which most is delayed or dropped by compression; else empty."""
    plan = recipe.plan
    compression = plan.compression
    if compression is None or plan.sync or not compression.warmup_steps or recipe.optim.name != "adamw":
        return ""
    if plan.layout.dp_replicate == 1 or not _can_be_run(plan, f"sync=local:1 compress={compression}"):
        return ""
    return (
        f"compress={compression} gives AdamW incomplete gradients; sync=local:1 compress={compression} sends its"
        " updates instead, which costs less loss (docs/concepts/slow-links.md)"
    )


def bucket_chosen(run: Run) -> str:
    """The choice of `run.bucket_mb: auto`, and why; empty: it is not auto."""
    return f"run.bucket_mb auto is {run.composed.bucket_chosen}" if run.composed.bucket_chosen else ""


def algorithm_chosen(run: Run) -> str:
    """The choice of `comm.algorithm: auto` when the model was prepared, and why; empty: it is not auto."""
    if run.policies.sync.algorithm != "auto":
        return ""
    comm_threads = run.composed.comm_threads
    if comm_threads is None:
        return "comm.algorithm auto is builtin: there is one replica"
    return f"comm.algorithm auto is {comm_threads.transports[0].algorithm}: {comm_threads.why}"


def _replica(job: Job, trial: Run) -> tuple[float, list[tuple[int, ...]], int]:
    """Seconds of a step on the slowest rank; the shapes of this rank's parameters; and the bytes of an element."""
    recipe = job.recipe
    trial.prepare(build_for_layout(recipe.model, recipe.run.seed))
    trial.prepare(optimizer_of_run(trial, recipe.optim, lr=recipe.optim.lr))
    loader = build_loader(job, trial, workers=0)
    seconds = []
    try:
        for number, batch in enumerate(trial.batches(loader)):
            start = time.perf_counter()
            trial.step(batch)
            trial.check_last_step()
            seconds.append(trial.world.all_reduce_host([time.perf_counter() - start], "max").wait()[0])
            if number == TRIALS:
                break
    finally:
        loader.close()
    shards = [to_local(parameter) for parameter in trial.parameters if parameter.requires_grad]
    return median(seconds[1:]), [tuple(shard.shape) for shard in shards], shards[0].element_size()
