"""`RunState`: the state of a training run on one rank, which every part of a run reads.

RunState        ranks, plan, precision, model, optimizer, loaders, steps made
  ├─ run_prepare      puts model, optimizer, schedulers and loaders into it
  ├─ open_step        cuts a batch into microbatches
  ├─ global_loss      scales the losses of microbatches to the loss of the global batch
  ├─ step.engine      forwards, backwards and the update
  ├─ evaluate         the mean loss over batches
  └─ run_checkpoint   saves and loads it
Run             the public object: a RunState with the methods above
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan
from shoal.checkpoint.async_saver import AsyncSaver
from shoal.comm.mesh import Mesh
from shoal.comm.world import World
from shoal.data.sharded_dataloader import ShardedDataLoader
from shoal.errors import ShoalError
from shoal.numerics.gradients import LossScale
from shoal.numerics.offload.host_copies import HostCopies
from shoal.numerics.precision import precision_of
from shoal.parallel.context.attention import cut_batch, is_cut
from shoal.parallel.parallel_model import ParallelModel
from shoal.parallel.policies import Policies
from shoal.parallel.tensor import TensorParallel
from shoal.train.checks import reject_open
from shoal.train.loss.objective import CrossEntropy, Objective, shifted_batch
from shoal.train.step.optimizer_step import Updates
from shoal.train.step.report import OpenStep, StepReport

if TYPE_CHECKING:
    from shoal.train.ema import EMA


class RunState:
    """What one rank holds of a run. `plan` is resolved for the ranks of `world`."""

    model_section: dict[str, Any] | None = None
    """The section of a recipe that builds the model, where a script has built it by name."""

    def __init__(
        self,
        plan: Plan,
        *,
        world: World,
        objective: Objective,
        policies: Policies,
    ) -> None:
        self.plan, self.world, self.objective, self.policies = plan, world, objective, policies
        self.precision = precision_of(plan.precision, policies.compute.param_dtype)
        self.updates = Updates.of(policies.step, world, scales_loss=self.precision.scales_loss)
        self.seed = policies.compute.seed
        self.mesh = Mesh.make(world, plan.layout)
        self.tensor = TensorParallel(self.mesh.groups.get("tp"), splits_tokens=bool(plan.sp))
        """For layers that a model's author splits: ColumnParallelLinear(..., tensor=run.tensor)."""
        self.coordinate = plan.layout.data_coordinate(world.rank)
        self.degree = plan.layout.data_degree
        self.gradient_degree = plan.layout.degree("dp_cp")
        self.steps_done = 0
        self.signals: dict[str, float] = {}
        """Numbers that this rank adds to the next step's; their sums over all ranks come back in `agreed`."""
        self.agreed: dict[str, float] = {}
        self.report: StepReport | None = None
        """What is known of the last step."""
        self.on_microbatch: Callable[[int], None] | None = None
        """Called with its number before the forward of each microbatch; in a pipeline, of each stage of this rank."""
        self.on_gradients: Callable[[], None] | None = None
        """Called when the gradients of a step are whole, before they are clipped."""
        self.after_update: Callable[[], None] | None = None  # called at the end of every step, by a profile
        self.parallel_model: ParallelModel | None = None
        """None: no model is prepared yet. `composed` raises then."""
        self.description = Description()
        self.fused_layers: str | None = None
        """One line about the layers of the model that were swapped; None: none."""
        self.shifts_labels = False
        """Whether labels are moved to the token before, as the model would, when tokens are divided."""
        self.unchecked_forward: inspect.Signature | None = None
        """The signature of the model's forward, until a batch was compared with it."""
        self.prepared_optimizer: Optimizer | None = None
        """None: no optimizer is prepared yet. `optimizer` raises then."""
        self.host_copies: HostCopies | None = None
        self.ema: EMA | None = None
        """The average of the weights, if there is one."""
        self.saved_ema = 0
        """Updates of the average in the checkpoint that was loaded; 0: it has none, or `ema` has taken it."""
        self.loaders: list[ShardedDataLoader] = []
        self.schedulers: list[Any] = []
        """Prepared schedulers of learning rates, which the script steps."""
        self.saved_loaders: list[dict[str, Any]] = []
        """Kind and position of each loader in the checkpoint that was loaded."""
        self.extra: dict[str, Any] = {}
        """The `extra` of the checkpoint that was loaded."""
        self.savers: dict[str, AsyncSaver] = {}
        """Directory → the saver that writes to it beside the training."""
        self.open_step: OpenStep | None = None
        """The step whose batch was taken and whose update was not made."""
        self.defers_count = self.compares_samples = False
        """Whether the count of the last step's loss was known only after its forwards, or not even then."""
        self.replicas_agreed_at: int | None = None
        """The last step after which all copies of tensors were compared and equal."""

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return self.world.device

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that writes and prints."""
        return self.world.is_main

    @property
    def loss_scale(self) -> LossScale:
        """The factor of losses under fp16; elsewhere 1."""
        return self.updates.loss_scale

    @property
    def composed(self) -> ParallelModel:
        """The prepared model as it lies over the ranks."""
        if self.parallel_model is None:
            raise ShoalError(
                "this run has no model yet",
                fix="model, optimizer, loader = run.prepare(model, optimizer, loader)",
                code="T030",
            )
        return self.parallel_model

    @property
    def model(self) -> nn.Module:
        """The prepared model, which a forward calls."""
        return self.composed.model

    @property
    def module(self) -> nn.Module:
        """The model itself, under the names that it has on one device; in a pipeline, this rank's first stage."""
        return self.composed.parts[0].model

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, or pieces of them, that this rank holds. Build an optimizer of your own over them."""
        return list(self.composed.named.values())

    @property
    def optimizer(self) -> Optimizer:
        """The prepared optimizer."""
        if self.prepared_optimizer is None:
            raise ShoalError(
                "this run has no optimizer yet", fix="model, optimizer = run.prepare(model, optimizer)", code="T030"
            )
        return self.prepared_optimizer

    def trained_parameters(self) -> list[nn.Parameter]:
        """The parameters of the model that the optimizer updates; under offload, it holds copies of them."""
        if self.host_copies is not None:
            return [parameter for parameter, _ in self.host_copies.pairs]
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def check_last_step(self) -> None:
        """Wait for the last step and check its gradient: end the run, or report why its update was dropped, if it was
        not finite. On a GPU that is otherwise known only when the next step has been queued."""
        self.updates.check_last_step()

    def reject_open_step(self, why: str) -> None:
        """Raise between a batch that was taken and its update."""
        reject_open(self.open_step, why)

    def own_tokens(self, batch: Any) -> Any:
        """With context parallelism, this rank's tokens of a batch; without it, or of what is cut already, the batch."""
        context = self.parallel_model.context if self.parallel_model is not None else None
        if context is None:
            return batch
        if self.shifts_labels and not is_cut(batch):
            batch = shifted_batch(batch)
        return cut_batch(batch, self.description, context)

    def split_logits_for_loss(self) -> AbstractContextManager[None]:
        """A stage calls the model outside of the objective, which splits the logits otherwise."""
        return self.composed.tensor.split_logits() if isinstance(self.objective, CrossEntropy) else nullcontext()
