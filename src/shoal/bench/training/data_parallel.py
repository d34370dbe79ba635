"""`nn.DataParallel` as a row of the scaling table: one process, one replica on each GPU, gathered at every step.

torch runs it as the plain module where there are fewer than two GPUs, without a warning. So it is measured with two or
more alone. Its loop is plain torch: the mean over the labels of the whole batch, clipping, and the same optimizer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Store
from torch.nn.functional import cross_entropy

from shoal.bench.training.cases import with_settings
from shoal.bench.training.time_steps import RankSteps
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.launch.local import launch
from shoal.numerics.init import initialise
from shoal.numerics.optim.build import build_optimizer, set_lr
from shoal.parallel.inspect.live_memory import num_bytes, peak_bytes
from shoal.predict.exact.state_memory import Memory
from shoal.train.build_model import build_model
from shoal.train.recipe.build_run import build_loader, build_run
from shoal.train.recipe.preflight import Job

NAME = "nn.DataParallel"


def why_not(num_gpus: int, job: Job) -> str:
    """Why it is not measured; empty: it is."""
    if num_gpus < 2:
        return "torch runs it as one plain module where there are not two GPUs: nothing to compare"
    is_plain = (
        job.recipe.plan.precision == "fp32" and job.recipe.model.lora is None and ":" not in job.recipe.model.name
    )
    return "" if is_plain else "measured in fp32 with shoal's own models alone"


def measure(job: Job, num_steps: int, num_gpus: int) -> Sequence[RankSteps]:
    """Make this many steps in one process of its own."""
    return launch(time_data_parallel, (job, num_steps, num_gpus), nproc=1, timeout=job.recipe.launch.timeout)


def time_data_parallel(
    placement: Placement | None, store: Store | None, job: Job, num_steps: int, num_gpus: int
) -> RankSteps:
    """Time the steps of one process. `num_gpus` 0: on the CPU, where torch calls the plain module."""
    recipe = with_settings(job.recipe, run={"loss": "plain"})
    world = World.start(placement, device="cuda" if num_gpus else "cpu", store=store, threads=recipe.launch.threads)
    with build_run(recipe, world) as run:
        loader = build_loader(job, run, workers=0)
        process = peak_bytes(world.device)
        model = build_model(recipe.model).to(world.device)
        initialise(model, recipe.run.seed)
        optimizer = build_optimizer(model.parameters(), recipe.optim, lr=recipe.optim.lr)
        parallel = nn.DataParallel(model, device_ids=list(range(num_gpus)) or None)
        seconds, waited, losses, norms = [], [], [], []
        for number in range(num_steps):
            begin, before = time.perf_counter(), loader.seconds_waited
            batch = {name: torch.as_tensor(part).to(world.device) for name, part in next(loader).items()}
            set_lr(optimizer, (number + 1) / num_steps)
            loss, norm = _step(parallel, optimizer, batch, recipe.optim.clip)
            losses.append(loss)
            norms.append(norm)
            waited.append(loader.seconds_waited - before)
            seconds.append(time.perf_counter() - begin - waited[-1])
        loader.close()
        states = [
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim()
        ]
        size = num_bytes(model.parameters())
        return RankSteps(
            seconds=tuple(seconds),
            waited=tuple(waited),
            losses=tuple(losses),
            norms=tuple(norms),
            peak=peak_bytes(world.device),
            process=process,
            states=Memory(parameters=size, gradients=size, optimizer=num_bytes(states)),
        )


def _step(
    parallel: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any], clip: float | None
) -> tuple[float, float]:
    """Make a step; returns its loss, and the norm of its gradient before clipping."""
    inputs = {name: part for name, part in batch.items() if name != "labels"}
    logits = parallel(**inputs)
    loss = cross_entropy(logits.float().flatten(0, -2), batch["labels"].flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(parallel.parameters(), math.inf if clip is None else clip)
    optimizer.step()
    return float(loss.detach()), float(norm)
