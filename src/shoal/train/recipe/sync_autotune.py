"""`sync=auto`: how replicas should meet here, from what a step takes without them and what the link can do.

Every rank makes a few steps of the run on its own island, without meeting, on a copy of the model that is thrown away;
then all measure the link and the codecs together, and `shoal.predict.estimate.replica_sync` chooses.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from statistics import median

from shoal.blueprint.plan import Plan
from shoal.comm.replicas.link_probe import codec_seconds, link_of
from shoal.comm.replicas.transport import Transport
from shoal.comm.world import World
from shoal.config.no_effect import without_no_effect
from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.numerics.local_tensor import to_local
from shoal.numerics.optim.build import build_optimizer
from shoal.parallel.checks import reject_unsupported
from shoal.predict.estimate.replica_sync import WAYS, Link, ReplicaShape, Step, choose, sync_traffic
from shoal.train.build_model import build_for_layout
from shoal.train.recipe.build_run import build_loader, build_run
from shoal.train.recipe.preflight import Job
from shoal.train.run import Run

NEVER = "local:1000000000"
TRIALS = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """What was measured, and what follows from it."""

    replicas: int
    island: ReplicaShape
    link: Link
    codec: dict[str, float]
    chosen: Step
    steps: list[Step]
    why: str


def estimate(job: Job, world: World, ways: tuple[str, ...] = WAYS) -> Estimate | None:
    """Measure, and choose. Every rank calls it, and all come to the same. None: there is one replica."""
    plan = job.recipe.plan
    if plan.layout.dp_replicate == 1:
        return None
    ways = tuple(words for words in ways if _can_be_run(plan, words))
    alone = job.recipe.model_copy(update={"comm": job.recipe.comm.model_copy(update={"warmup_steps": 0})})
    trial = build_run(alone, world, replace(plan, sync=NEVER, compress=None))
    compute, shapes, width = _replica(job, trial)
    transport = Transport(trial.mesh.new_group("dp_replicate"), trial.mesh.comm_device)
    link = link_of(transport)
    methods = {Plan.parse(words).compress for words in ways} - {None}
    codec = codec_seconds(transport, sorted(method for method in methods if method is not None))
    trial.composed.close()
    del trial
    gc.collect()
    island = ReplicaShape(compute, shapes, width)
    told = world.all_gather_object((island, link, codec), kinds=(ReplicaShape, Link))[
        0
    ]  # those of other islands may have other shards
    chosen, steps, why = choose(told[0], told[1], plan.layout.dp_replicate, told[2], ways)
    return Estimate(plan.layout.dp_replicate, *told, chosen, steps, why)


def _can_be_run(plan: Plan, words: str) -> bool:
    try:
        reject_unsupported(sync_traffic(plan, words))
    except ShoalError:
        return False
    return True


def resolve_sync(job: Job, world: World) -> tuple[Job, str]:
    """The job with `sync=auto` made one of the ways, and the reason in words; else as it is."""
    plan = job.recipe.plan
    if plan.sync != "auto":
        return job, ""
    weighed = estimate(job, world)
    chosen = sync_traffic(plan, "" if weighed is None else weighed.chosen.words)
    why = "there is one replica" if weighed is None else f"{weighed.why} (predicted from what was measured)"
    said = "gradients at every step" if weighed is None or not weighed.chosen.words else weighed.chosen.words
    update = {"plan": chosen, "comm": without_no_effect(job.recipe.comm, chosen)}
    return replace(job, recipe=job.recipe.model_copy(update=update)), f"sync=auto is {said}: {why}"


def advice(recipe: Recipe) -> str:
    """What to think of, where Adam would divide by gradients of which most is late or left out."""
    plan = recipe.plan
    compression = plan.compression
    if compression is None or plan.sync or not compression.warmup_steps or recipe.optim.name != "adamw":
        return ""
    if plan.layout.dp_replicate == 1 or not _can_be_run(plan, f"sync=local:1 compress={compression}"):
        return ""
    return (
        f"compress={compression} leaves AdamW to divide by what has arrived; sync=local:1 compress={compression} sends"
        " its steps instead, and loses less (docs/concepts/slow-links.md)"
    )


def bucket_chosen(run: Run) -> str:
    """What `run.bucket_mb: auto` has come to, and why; empty: nothing was left open."""
    return f"run.bucket_mb auto is {run.composed.bucket_chosen}" if run.composed.bucket_chosen else ""


def algorithm_chosen(run: Run) -> str:
    """What `comm.algorithm: auto` has come to when the model was prepared, and why; empty: nothing was left open."""
    if run.policies.sync.algorithm != "auto":
        return ""
    comm_threads = run.composed.comm_threads
    if comm_threads is None:
        return "comm.algorithm auto is builtin: there is one replica"
    return f"comm.algorithm auto is {comm_threads.transports[0].algorithm}: {comm_threads.why}"


def _replica(job: Job, trial: Run) -> tuple[float, list[tuple[int, ...]], int]:
    """Seconds of a step of an island, on the slowest; the shapes that this rank holds of it, and bytes of a number."""
    recipe = job.recipe
    trial.prepare(build_for_layout(recipe.model, recipe.run.seed))
    trial.prepare(build_optimizer(trial.parameters, recipe.optim, lr=recipe.optim.lr))
    loader = build_loader(job, trial, workers=0)
    took = []
    try:
        for number, batch in enumerate(trial.batches(loader)):
            began = time.perf_counter()
            trial.step(batch)
            trial.settle()
            took.append(trial.world.all_reduce_host([time.perf_counter() - began], "max").wait()[0])
            if number == TRIALS:
                break
    finally:
        loader.close()
    held = [to_local(parameter) for parameter in trial.parameters if parameter.requires_grad]
    return median(took[1:]), [tuple(piece.shape) for piece in held], held[0].element_size()
