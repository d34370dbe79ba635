"""From the losses of microbatches and ranks to the loss of the global batch.

    s  loss sum of a microbatch      w  its weight: how many labels count      W  their number over the global batch

Each backward starts from  s * degree / W.  Gradients are averaged over `degree` ranks, so the gradient is  Σ s / W.

With `loss_mean="microbatch"` every microbatch counts the same: W is  w * M,  M the number of microbatches of all ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.numerics.gradients import gradients_of, scale_
from shoal.numerics.local_tensor import to_local
from shoal.train.checks import reject_routers_with_deferred_count
from shoal.train.loss.counting import Kind
from shoal.train.loss.deferred_count import agree, agree_on_kind, convention, is_deferred, reject_uncounted
from shoal.train.loss.objective import CrossEntropy, MeanOf
from shoal.train.run_state import RunState
from shoal.train.step.report import OpenStep


class GlobalLoss:
    """The weight of each microbatch in the loss of the global batch, and the correction of an estimated one."""

    def __init__(self, state: RunState) -> None:
        self.state = state

    def factor(self, step: OpenStep, number: int | None = None) -> float:
        """The factor of a microbatch's loss sum in the gradient. `number` None: of the one at hand."""
        return self.state.gradient_degree / self.total_weight(step, number) * self.state.loss_scale.scale

    def total_weight(self, step: OpenStep, number: int | None = None) -> float:
        """W. Every rank that sees the same samples has reported them once more."""
        total, num_samples, *signals = step.agreed.wait()
        if step.is_mean_of_means:
            total *= step.weight_of_mean(number)
        self.state.agreed = dict(zip(step.signals, signals, strict=True))
        if total == 0 and self._is_estimated(step):
            total = num_samples
        if total == 0:
            raise ShoalError(
                "not one label of this global batch counts: all are -100",
                fix=f"--data.global_batch {2 * int(num_samples)}",
                code="T013",
            )
        return total * self.state.gradient_degree / self.state.world.size

    def auxiliary_factor(self, step: OpenStep, number: int) -> float:
        """The factor of one sequence's auxiliary loss: it is a mean over the sequences of the global batch."""
        state = self.state
        _, num_samples, *_ = step.agreed.wait()
        whole = num_samples * state.degree / state.world.size
        return 0.0 if step.is_stand_in(number) else state.gradient_degree / whole * state.loss_scale.scale

    def is_alone(self, step: OpenStep) -> bool:
        """Whether the global batch is one microbatch, whose mean is the loss."""
        is_one = len(step.microbatches) == 1 or (step.index < 0 and self.state.composed.pipeline is None)
        return self.state.gradient_degree == 1 and is_one

    def own(self, step: OpenStep) -> Tensor:
        """This rank's part of the loss: of those that computed the same one, only the first has it."""
        dtype = self.state.precision.wide_dtype
        if step.sums and self.state.mesh.coordinate["tp"] == 0:
            total = step.sums[0].clone() if len(step.sums) == 1 else torch.stack(step.sums).sum()
            return total.to(dtype)
        return torch.zeros((), dtype=dtype, device=self.state.device)

    def is_deferred(self, step: OpenStep) -> bool:
        """Whether gradients are still to be divided by what the forwards have counted; the same on every rank. Raise if
        the losses of microbatches and ranks cannot be put together."""
        state = self.state
        if step.is_mean_of_means:
            return False
        is_in_pipeline = state.composed.pipeline is not None  # of which only last stages have seen a loss
        is_counted = isinstance(state.objective, MeanOf) if is_in_pipeline else bool(step.kinds)
        kind = agree_on_kind(step, state.world) if is_counted else None
        is_alone = self.is_alone(step)
        state.compares_samples = kind in (Kind.MEAN, Kind.SUM) and not is_alone
        if state.compares_samples:
            assert kind is not None
            reject_uncounted(step, kind, state.world)
        return is_deferred(kind, is_alone=is_alone)

    def correct(self, step: OpenStep, loss: Tensor) -> Tensor:
        """Divide gradients by the count of the global batch in place of its estimate; returns the loss."""
        state = self.state
        agreed = agree(
            step,
            loss,
            estimate=self.total_weight(step),
            is_owner_of_loss=state.mesh.coordinate["tp"] == 0,
            world_size=state.world.size,
        )
        if state.composed.balance is not None:
            reject_routers_with_deferred_count(agreed.correction)
        corrected = {id(one): one for one in [*state.composed.named.values(), *state.trained_parameters()]}
        scale_([to_local(gradient) for gradient in gradients_of(corrected.values())], agreed.correction)
        if isinstance(state.objective, CrossEntropy) and state.objective.rule.is_shifted is None:
            state.objective.rule.is_shifted = convention(agreed)
        return agreed.loss

    def _is_estimated(self, step: OpenStep) -> bool:
        """Whether the weight of a batch is no more than an estimate, which must not be 0."""
        if self.state.composed.pipeline is not None and not step.kinds:
            return isinstance(self.state.objective, MeanOf)
        return bool(step.kinds) and (self.is_alone(step) or step.kinds <= {Kind.COUNTED, Kind.PAIR})
