"""`Run`: the public object of a training run, for a loop of your own and for shoal's.

What a rank holds of it is in `run_state`; how a step is made, in `step_engine`.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, overload

from torch import Tensor

from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.bf16_weights import reject_bf16_weights
from shoal.comm.rendezvous.environment import read_environment
from shoal.comm.world import World, use_device
from shoal.data.loader import Loader
from shoal.data.sharded_dataloader import ShardedDataLoader
from shoal.errors import ShoalError
from shoal.numerics.determinism import make_deterministic
from shoal.parallel.checks import reject_unsupported
from shoal.parallel.policies import Policies, Settings, setting_names, settings_help
from shoal.train.checks import reject_options, reject_several, reject_unprepared
from shoal.train.evaluate import evaluate
from shoal.train.loss.objective import CrossEntropy, LossFunction, Objective, objective_of
from shoal.train.replica_check import ReplicaCheck
from shoal.train.run_checkpoint import load_run, save_run, wait_for
from shoal.train.run_prepare import prepare
from shoal.train.run_state import RunState
from shoal.train.step.engine import StepEngine
from shoal.train.step.open_step import counts_like_data, open_step
from shoal.train.step.report import Counted, StepReport


class Run(RunState):
    """A rank's part in a training run. docs/run.md shows your own loops, validation and saving.

    plan      words such as "bf16 mb=4", or a Plan; the ranks are found under python, torchrun, srun and mpirun
    loss      loss(model, batch), the mean over a microbatch, or (sum, count); None: cross-entropy of model(inputs) and
              labels, which a model that takes labels may shift
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
        _reject_unknown(settings)
        requested, policies = Plan.of(plan), Policies.of(**settings)
        if policies.compute.deterministic:
            make_deterministic()
        objective = objective_of(loss)
        if policies.compute.fused_loss and not isinstance(objective, CrossEntropy):
            raise ShoalError(
                "a loss of one's own is not computed inside the model's last layer",
                fix="fused_loss=None; or no loss=, which is the cross-entropy of batches with labels",
            )
        world = world or World.start(read_environment(os.environ), device=device, timeout=timeout, threads=threads)
        resolved = requested.resolve(world.size)
        reject_unsupported(resolved)
        if resolved.sync == "auto":
            raise ShoalError("sync=auto is chosen by `shoal train`", fix="sync=diloco:50, compress=int8, or neither")
        if policies.compute.param_dtype == "bf16":
            reject_bf16_weights(resolved, weights="param_dtype='fp32'", precision="Run('bf16')")
        super().__init__(resolved, world=world, objective=objective, policies=policies)
        self.engine = StepEngine(self)
        self.replica_check = ReplicaCheck(policies.step.check_replicas)

    # ---- prepare and step --------------------------------------------------------------------------------------------

    def prepare(self, *things: Any) -> Any:
        """Place a model, an optimizer, its schedulers and loaders, in any order; returns them in that order.

        A `DataLoader`'s batch_size is the *global* batch: each rank gets its share, so the same script computes the
        same thing on any number of ranks. A scheduler is saved and loaded with the run; the script steps it.
        """
        prepared = prepare(self.engine, things)
        return prepared[0] if len(prepared) == 1 else prepared

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """This rank's share of each global batch, on the device. Every rank gets as many, so all take every step."""
        if isinstance(loader, ShardedDataLoader):
            for share in loader.shares():
                step = open_step(self, share.batch, counts=share.counts, offset=share.offset, largest=share.largest)
                yield step.batch
        else:
            reject_unprepared(loader, self.world.size)
            counted = Counted.of(loader) if isinstance(loader, Loader) and counts_like_data(self) else None
            for batch in loader:
                yield open_step(self, batch, counted=counted).batch

    def step(self, batch: Any, *others: Any) -> Tensor:
        """Forward, backward and update over this rank's share of a global batch; returns the global loss."""
        reject_several(others)
        self.engine.forward_backward(batch)
        return self.update().loss

    def microbatches(self, batch: Any) -> Iterator[Any]:
        """The batch in parts of `mb` samples; gradients are synchronised in the backward of the last one only."""
        return self.engine.microbatches(batch)

    def backward(self, loss: Tensor | tuple[Tensor, Tensor | float]) -> None:
        """Backward of a loss that is the *mean* over the microbatch (or the batch, without accumulation) at hand, or
        (sum, count)."""
        self.engine.backward(loss)

    def update(self) -> StepReport:
        """Clip, apply the optimizer and clear the gradients; or drop the step if the gradient is not finite."""
        report = self.engine.update()
        self.replica_check.after(self, self.steps_done)
        return report

    # ---- save and load -----------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """Every parameter, whole, under the name that it has on one device, in host memory of the main rank; and biases
        of routers and running statistics of batch norm. It is empty on the other ranks, which have to call this too."""
        self.check_last_step()
        with self.composed.shared_weights():
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
        """Save the run as it is after its last step to a directory of this step in `directory`: parameters, optimizer
        and its learning rate, prepared schedulers, loss scale, the positions of prepared loaders, and how many steps
        were made. Every rank calls it.

        wait    True: return when all of it is on the disk, or raise. False: when it is copied; it is written during the
                next steps, one save at a time, and `run.wait_for_save(directory)` waits for it
        keep    how many of the newest steps stay; None: all of them, and two under wait=False
        extra   values of the main rank that `load` puts into `run.extra`: anything that JSON can hold
        """
        save_run(self, directory, wait=wait, keep=keep, extra=extra)

    def wait_for_save(self, directory: str | Path) -> None:
        """Return when what was saved without waiting is on the disk; raise if it could not be."""
        if (saver := self.savers.get(str(directory))) is not None:
            wait_for(saver)

    def load(self, directory: str | Path, *, step: int | None = None, only_weights: bool = False) -> int:
        """Resume from a step that was saved, or from the newest one, by any layout on any number of ranks. Every rank
        calls it, when model, optimizer, schedulers and loaders are prepared; returns how many steps were made.
        `only_weights`: load the model alone, for a run of another kind."""
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
        with self.composed.shared_weights():
            return evaluate(self, batches, stop)

    def sync_replicas(self) -> None:
        """Under `sync=`, average the weights of all replicas now, as at the end of a run. Every rank calls it."""
        self.reject_open_step("to synchronize replicas")
        self.check_last_step()
        if self.composed.local_sgd is not None:
            self.composed.local_sgd.exchange_all(self.steps_done)
            self.composed.before_evaluation()

    def gather_tokens(self, x: Tensor, dim: int = 1) -> Tensor:
        """Join what every rank has computed for its own tokens (logits, say) to all tokens of the sequence, in order.
        Without context parallelism a rank has them all already. No gradient flows back through it."""
        context = self.composed.context
        return x.detach() if context is None else context.join(x.detach(), dim)

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over all ranks, for a script's own validation; every rank must call it. Ranks that see the
        same tokens count once."""
        place = self.mesh.coordinate
        is_owner_of_loss = place["tp"] == place["pp"] == 0
        return self.world.all_reduce_host(numbers if is_owner_of_loss else [0.0] * len(numbers)).wait()

    def close(self) -> None:
        """Leave the world, if this run entered it."""
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
        finally:
            self.world.__exit__(kind, error, trace)

    def _finish_saves(self) -> None:
        if self.parallel_model is not None:
            self.parallel_model.close()
        for directory in self.savers:
            self.wait_for_save(directory)


# help(shoal.Run) lists what a script can type, and the policies are the one place that says it.
Run.__doc__ = f"{inspect.cleandoc(Run.__doc__ or '')}\n\n{settings_help()}"


def _reject_unknown(settings: Mapping[str, Any]) -> None:
    """Arguments that neither a run nor its policies have."""
    named = [name for name, one in inspect.signature(Run.__init__).parameters.items() if one.kind is one.KEYWORD_ONLY]
    known = [*named, *setting_names()]
    reject_options({name: value for name, value in settings.items() if name not in known}, known)
