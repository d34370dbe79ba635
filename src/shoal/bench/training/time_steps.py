"""Time the steps of a recipe as one rank, and count its memory by cause."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from torch.distributed import Store

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.numerics.lr_schedule import scaled_lr
from shoal.numerics.optim.build import set_lr
from shoal.observe.progress import Quiet
from shoal.parallel.inspect.live_memory import live_memory, peak_bytes
from shoal.predict.exact.state_memory import Memory
from shoal.train.build_model import build_for_layout
from shoal.train.optim.build import optimizer_of_run
from shoal.train.recipe.build_run import build_loader, build_run
from shoal.train.recipe.preflight import Job, first_call
from shoal.train.recipe.saving.run_storage import load_first_weights
from shoal.train.recipe.saving.start_weights import expect_weights
from shoal.train.run import Run
from shoal.train.trace.find_blocks import attach_blocks

SERIES = ("seconds", "waited", "losses", "norms")
"""Values of every step."""
COUNTED_STEP = 1
"""The step whose memory is counted: the second, since the first one creates the state of the optimizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSteps:
    """The steps of one rank."""

    seconds: tuple[float, ...]
    """Of each step, without the time that it waited for its batch."""
    waited: tuple[float, ...]
    """Seconds that each step waited for its batch."""
    losses: tuple[float, ...]
    """Of the global batch of each step, the same on every rank."""
    norms: tuple[float, ...]
    """Of the gradient of each step, before clipping; the same on every rank."""
    peak: int
    """Bytes at the fullest moment: tensors on a GPU, the resident process on a CPU."""
    process: int
    """Bytes of the same kind before the model was built."""
    states: Memory
    """Bytes of parameters, gradients and optimizer state before an update, counted."""

    def to_mapping(self) -> dict[str, Any]:
        """As plain values, for another rank or host."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in SERIES}}

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> RankSteps:
        """From plain values.

        >>> series = {"seconds": (1.0,), "waited": (0.0,), "losses": (2.0,), "norms": (0.5,)}
        >>> steps = RankSteps(**series, peak=3, process=1, states=Memory(1, 1, 0))
        >>> RankSteps.of(steps.to_mapping()) == steps
        True
        """
        series = {name: tuple(map(float, said[name])) for name in SERIES}
        memory = Memory(**{name: int(value) for name, value in said["states"].items()})
        return cls(**series, peak=int(said["peak"]), process=int(said["process"]), states=memory)


def time_steps(
    placement: Placement | None,
    store: Store | None,
    job: Job,
    num_steps: int,
    *,
    join: Callable[[list[RankSteps]], RankSteps] | None = None,
) -> RankSteps:
    """Make this many steps, the first ones included. Every rank calls it. `join` makes one result of those of all
    ranks; None: each returns its own."""
    launch = job.recipe.launch
    world = World.start(placement, device=launch.device, timeout=launch.timeout, store=store, threads=launch.threads)
    process = peak_bytes(world.device)
    with build_run(job.recipe, world) as run:
        _prepare(run, job)
        held: list[Memory] = []
        seconds, waited, losses, norms = _steps(run, job, num_steps, held)
        own = RankSteps(
            seconds=tuple(seconds),
            waited=tuple(waited),
            losses=tuple(losses),
            norms=tuple(norms),
            peak=peak_bytes(world.device),
            process=process,
            states=held[0],
        )
        return own if join is None else join([RankSteps.of(each) for each in world.all_gather_object(own.to_mapping())])


def _prepare(run: Run, job: Job) -> None:
    """Model, optimizer and first weights, as `shoal train` makes them."""
    recipe, optim = job.recipe, job.recipe.optim
    model = build_for_layout(recipe.model, recipe.run.seed)
    expect_weights(recipe, model)
    attach_blocks(model, run.plan.layout.pp, functools.partial(first_call, model, job.training))
    run.prepare(model)
    lr = scaled_lr(optim.lr, batch=recipe.data.global_batch, tuned_for_batch=optim.scale_lr_from_batch)
    run.prepare(optimizer_of_run(run, optim, lr=lr, seed=recipe.run.seed))
    load_first_weights(run, job, Quiet(Console(quiet=True)))


def _steps(run: Run, job: Job, num_steps: int, held: list[Memory]) -> tuple[list[float], ...]:
    """The values of `SERIES`. The learning rate rises over all steps, so that losses stay comparable."""
    seconds: list[float] = []
    waited: list[float] = []
    losses: list[float] = []
    norms: list[float] = []
    counted = min(COUNTED_STEP, num_steps - 1)
    loader = build_loader(job, run, workers=0)
    run.world.barrier()
    try:
        batches = run.batches(loader)
        for number in range(num_steps):
            if number == counted:
                run.on_gradients = lambda: held.append(live_memory(run.composed, run.optimizer))
            begin, before = time.perf_counter(), loader.seconds_waited
            batch = next(batches)
            set_lr(run.optimizer, (number + 1) / num_steps)
            losses.append(float(run.step(batch)))  # it waits for the device
            waited.append(loader.seconds_waited - before)
            seconds.append(time.perf_counter() - begin - waited[-1])
            run.on_gradients = None
            assert run.report is not None
            norms.append(float(run.report.grad_norm))
    finally:
        loader.close()
    return seconds, waited, losses, norms
