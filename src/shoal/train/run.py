"""`Run`: the public object of a training run, for a loop of your own and for shoal's.

`run_state` has the state of one rank, `step.engine` the training step.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, overload

import torch.distributed as dist
from torch import Tensor

from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.bf16_weights import check_bf16_weights
from shoal.blueprint.validation.check import check_ranks, check_unread
from shoal.comm.profile.timer import EVALUATION, part, timed_items
from shoal.comm.rendezvous.accelerate_settings import without_effect
from shoal.comm.rendezvous.launcher_environment import Placement, read_environment
from shoal.comm.world import World, reject_spawned_alone, use_device
from shoal.config.checks.arguments import check_start
from shoal.config.checks.settings import check_loss_mean, no_common_average
from shoal.data.loader import Loader
from shoal.data.sharded_dataloader import ShardedDataLoader
from shoal.errors import Findings, Problem
from shoal.numerics.determinism import make_deterministic
from shoal.parallel.policies import Policies, Settings, setting_names, settings_help
from shoal.train.checks import check_options, reject_several, reject_unprepared
from shoal.train.ema import EMA
from shoal.train.evaluate import evaluate
from shoal.train.loss.objective import CrossEntropy, LossFunction, Objective, objective_of
from shoal.train.optim.evaluation_weights import evaluation_weights
from shoal.train.replay.check import ComputeCheck
from shoal.train.replica_check import ReplicaCheck
from shoal.train.run_checkpoint import load_run, save_run, wait_for
from shoal.train.run_prepare import prepare
from shoal.train.run_state import RunState
from shoal.train.step.engine import StepEngine
from shoal.train.step.open_step import counts_like_data, open_step
from shoal.train.step.report import Counted, StepReport


class Run(RunState):
    """A training run with your own loop, as one rank takes part in it.

        run = shoal.Run("zero=3 mb=4 bf16")
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for batch in run.batches(loader):
            loss = run.step(batch)

    docs/run.md shows other losses, validation and saving.

    plan      words such as "bf16 mb=4", or a Plan; the ranks are found under python, torchrun, srun and mpirun
    loss      loss(model, batch), which returns the mean over a microbatch, or (sum, count); None: cross-entropy of
              model(inputs) and labels, which a model that takes labels may shift
    device    auto, cpu or cuda
    timeout   seconds that a rank waits for the others in one collective
    threads   CPU threads of this process; None: an even share of the cores
    world     the ranks, if they were gathered before
    settings  any of those below, by name: Run("bf16", clip=1.0, seed=3)
    """

    def __init__(
        self,
        plan: Plan | str | Mapping[str, Any] = "auto",
        *,
        loss: LossFunction | Objective | None = None,
        device: str = "auto",
        timeout: float = 600.0,
        threads: int | None = None,
        world: World | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        found = Findings()
        found += _check_unknown(settings)
        found += check_start(device=device, timeout=timeout, threads=threads)
        requested = found.of(Plan.of, plan)
        policies = found.of(Policies.of, **settings)
        objective = found.of(objective_of, loss)
        found += _check_together(requested, policies, objective)
        placement = None if world is not None else read_environment(os.environ)
        num_ranks = found.of(_num_ranks, world, placement)
        if num_ranks is not None:
            found += check_unread(plan, num_ranks) if requested is None else check_ranks(requested, num_ranks)
        found.raise_all(title="the arguments of a Run")
        assert requested is not None
        assert policies is not None
        assert objective is not None
        if policies.compute.deterministic:
            make_deterministic()
        world = world or World.start(placement, device=device, timeout=timeout, threads=threads)
        super().__init__(requested.resolve(world.size), world=world, objective=objective, policies=policies)
        self.engine = StepEngine(self)
        self.replica_check = ReplicaCheck(policies.step.check_replicas)
        self.compute_check = ComputeCheck(policies.step.check_compute)
        self._warn_of_launcher()

    def _warn_of_launcher(self) -> None:
        precision, zero = self.plan.precision, self.plan.zero or 0
        compiles = bool(self.policies.compute.compile)
        for what in without_effect(os.environ, precision=precision, zero=zero, compiles=compiles):
            if self.is_main:
                warnings.warn(what, stacklevel=3)

    # ---- prepare and step --------------------------------------------------------------------------------------------

    def prepare(self, *things: Any) -> Any:
        """Place a model, an optimizer, its schedulers and DataLoaders; return them in the given order.

        A `DataLoader`'s batch_size is the *global* batch: each rank gets its share, so the same script computes the
        same thing on any number of ranks. A scheduler is saved and loaded with the run; the script steps it.
        """
        prepared = prepare(self.engine, things)
        if self.policies.step.ema is not None and self.ema is None and self.parallel_model is not None:
            EMA(self, self.policies.step.ema)
        return prepared[0] if len(prepared) == 1 else prepared

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's share of each global batch, on the device. All ranks get the same number of batches."""
        if isinstance(loader, ShardedDataLoader):
            for share in timed_items("data", loader.shares()):
                step = open_step(self, share.batch, counts=share.counts, offset=share.offset, largest=share.largest)
                yield step.batch
        else:
            reject_unprepared(loader, self.world.size)
            counted = Counted.of(loader) if isinstance(loader, Loader) and counts_like_data(self) else None
            for batch in timed_items("data", loader):
                yield open_step(self, batch, counted=counted).batch

    def step(self, batch: Any, *others: Any) -> Tensor:
        """Run forward, backward and update on this rank's share of a global batch; return the global loss."""
        reject_several(others)
        with self.compute_check.recording(self):
            self.engine.forward_backward(batch)
        self.compute_check.compare(self.engine)
        return self.update().loss

    def microbatches(self, batch: Any) -> Iterator[Any]:
        """Yield the batch in parts of `mb` samples, for `backward` and `update`.

        Gradients are synchronised once, in the backward of the last part.
        """
        return self.engine.microbatches(batch)

    def backward(self, loss: Tensor | tuple[Tensor, Tensor | float]) -> None:
        """Run the backward of the loss of the current microbatch.

        loss  the *mean* over the microbatch (or over the batch, without accumulation), or (sum, count)
        """
        self.engine.backward(loss)

    def update(self) -> StepReport:
        """Clip, apply the optimizer and clear the gradients; or skip the update if a gradient is not finite."""
        with part("optimizer"):
            report = self.engine.update()
            if self.policies.step.ema is not None and self.ema is not None:
                self.ema.update()
        self.replica_check.after(self, self.steps_done)
        if self.after_update is not None:
            self.after_update()
        return report

    # ---- save and load -----------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Return every full parameter by name, in host memory of the main rank. Every rank calls it.

        Names are those on one device. Biases of routers and running statistics of batch norm are included. The other
        ranks get an empty dict.
        """
        self.check_last_step()
        with self.composed.shared_weights(), evaluation_weights(self):
            self.composed.before_evaluation()
            found = {**dict(self.composed.full_tensors("weight")), **self.composed.biases()}
            found |= self.composed.running_statistics()
        return {name: tensor for name, tensor in found.items() if tensor is not None and self.is_main}

    def save(
        self,
        directory: str | Path,
        *,
        wait: bool = True,
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the run after its last step, as a new step in `directory`. Every rank calls it.

        Saved are parameters, optimizer and its learning rate, prepared schedulers, loss scale, the positions of
        prepared loaders, and the number of steps.

        directory  a folder, or a URL that fsspec supports
        wait       True: return when all of it is on the disk, or raise. False: return when it is copied; it is written
                   during the next steps, one save at a time, and `run.wait_for_save(directory)` waits for it
        keep       how many of the newest steps stay; None: all of them, and two under wait=False
        extra      values of the main rank that `load` puts into `run.extra`: anything that JSON can hold
        """
        with part("save"), evaluation_weights(self):
            save_run(self, directory, wait=wait, keep=keep, extra=extra)

    def wait_for_save(self, directory: str | Path) -> None:
        """Wait until a save with `wait=False` is on the disk; raise if it failed."""
        if (saver := self.savers.get(str(directory))) is not None:
            wait_for(saver)

    def load(self, directory: str | Path, *, step: int | None = None, only_weights: bool = False) -> int:
        """Resume from a saved step, of any layout and number of ranks; return the number of steps made.

        Every rank calls it, after model, optimizer, schedulers and loaders are prepared.

        step          which one; None: the newest
        only_weights  load the model alone, for another run with the same weights
        """
        return load_run(self, directory, step, only_weights=only_weights)

    # ---- evaluation and the end ------------------------------------------------------------------------------------

    @overload
    def evaluate(self, batches: Iterable[Any]) -> float: ...

    @overload
    def evaluate(self, batches: Iterable[Any], *, stop: Callable[[], bool]) -> float | None: ...

    def evaluate(self, batches: Iterable[Any], *, stop: Callable[[], bool] | None = None) -> float | None:
        """Return the mean loss over the batches of all ranks, each sample once; weights do not change.

        batches  this rank's held-out batches: a prepared DataLoader, or any iterable
        stop     called by every rank before each of its batches; as soon as it is true on any rank, the rest is left
                 out and every rank returns None
        """
        use_device(self.device)
        self.check_last_step()
        with part(EVALUATION), self.composed.shared_weights(), evaluation_weights(self):
            return evaluate(self, batches, stop)

    def sync_replicas(self) -> None:
        """Under `sync=`, average the weights of all replicas now, as at the end of a run. Every rank calls it."""
        self.reject_open_step("to synchronize replicas")
        self.check_last_step()
        if self.composed.local_sgd is not None:
            self.composed.local_sgd.exchange_all(self.steps_done)
            self.composed.before_evaluation()

    def gather_tokens(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather what all ranks computed for their own tokens, such as logits, in the order of the sequence.

        It matters under context parallelism (`cp`) alone. No gradient flows through it.
        """
        context = self.composed.context
        return x.detach() if context is None else context.join(x.detach(), dim)

    def sum(self, *numbers: float) -> list[float]:
        """Sum each number over all ranks, for your own validation. Every rank calls it.

        Ranks that see the same tokens (`tp`, `pp`) count once.
        """
        place = self.mesh.coordinate
        is_owner_of_loss = place["tp"] == place["pp"] == 0
        return self.world.all_reduce_host(numbers if is_owner_of_loss else [0.0] * len(numbers)).wait()

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank, such as a reason to stop. Every rank calls it."""
        return self.world.all_reduce_host([float(bool(flag))]).wait()[0] > 0

    def close(self) -> None:
        """Finish saves and leave the process groups. `with shoal.Run(...) as run:` calls it."""
        try:
            if sys.exc_info()[0] is None:  # else other ranks may have left
                self.check_last_step()
                self._finish_saves()
        finally:
            self.world.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.check_last_step()
                self._finish_saves()
            elif self.parallel_model is not None:
                self.parallel_model.close()  # its threads would wait for work while the process lives on
        finally:
            self.world.__exit__(kind, error, trace)

    def _finish_saves(self) -> None:
        if self.parallel_model is not None:
            self.parallel_model.close()
        for directory in self.savers:
            self.wait_for_save(directory)


# help(shoal.Run) lists what a script can type, and the policies are the one place that says it.
Run.__doc__ = f"{inspect.cleandoc(Run.__doc__ or '')}\n\n{settings_help()}"


def _check_unknown(settings: Mapping[str, Any]) -> Iterator[Problem]:
    """Arguments that neither a run nor its policies have."""
    named = [name for name, one in inspect.signature(Run.__init__).parameters.items() if one.kind is one.KEYWORD_ONLY]
    known = [*named, *setting_names()]
    return check_options({name: value for name, value in settings.items() if name not in known}, known)


def _check_together(plan: Plan | None, policies: Policies | None, objective: Objective | None) -> Iterator[Problem]:
    """Arguments that exclude each other. None: it could not be read."""
    is_own_loss = objective is not None and not isinstance(objective, CrossEntropy)
    if policies is not None and policies.compute.fused_loss and is_own_loss:
        yield Problem(
            "T039",
            "a loss function of yours cannot be computed inside the model's last layer",
            "fused_loss=None; or no loss=, which is the cross-entropy of batches with labels",
        )
    if plan is not None and plan.sync and policies is not None and policies.step.ema is not None:
        yield no_common_average(plan)
    if plan is not None and policies is not None:
        yield from check_loss_mean(policies.step.loss_mean, plan)
    if plan is not None and plan.sync == "auto":
        yield Problem("P064", "sync=auto is chosen by `shoal train`", "sync=diloco:50, compress=int8, or neither")
    if plan is not None and policies is not None and policies.compute.param_dtype == "bf16":
        yield from check_bf16_weights(plan, weights="param_dtype='fp32'", precision="Run('bf16')")


def _num_ranks(world: World | None, placement: Placement | None) -> int:
    """The number of ranks before the world is started, so that a plan is checked before ranks wait for each other."""
    if world is not None:
        return world.size
    if dist.is_initialized():
        return dist.get_world_size()
    if placement is None:
        reject_spawned_alone()
    return placement.world_size if placement else 1
