"""The training step: forwards, backwards and the update.

One step, four microbatches, two ranks (s: loss sum, w: how many tokens count, W: their number over the global batch):

    rank 0   open [1] ── F B ── F B ── F B ── F B ┐[3]
                 └ W ──────────[2]                ├─ norm, clip, update [4]
    rank 1   open [1] ── F B ── F B ── F B ── F B ┘

[1] w is known from the data; its sum W over all ranks travels while the first forward runs, unless the dataset says how
    many labels of each sample count. A head that computes the loss reads W when it computes it, after the forward.
[2] Each backward starts from  s * degree / W.  Gradients are averaged over `degree` ranks, those that see other samples
    or other tokens of them, so the gradient is  Σ s / W.  A loss function shows w only after the forward: there W is an
    estimate, and [4] begins with the correction of it (`deferred_count`).
[3] Gradients are synchronised once, during the backward of the last microbatch.
[4] The global norm is the same number on every rank, and so is everything that is decided by it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal.comm.profile.timer import part
from shoal.hash_rng import hashed_number
from shoal.numerics.async_scalars import AsyncScalars
from shoal.parallel.data.ddp import explain_unused
from shoal.parallel.data.fsdp import explain_ungathered
from shoal.parallel.pipeline.pipeline import MicrobatchFeed
from shoal.train.checks import reject_own_loop, reject_own_update, reject_unknown_batch, with_all_backwards
from shoal.train.loss.counting import Loss, read_loss
from shoal.train.loss.deferred_count import take
from shoal.train.loss.global_loss import GlobalLoss
from shoal.train.loss.message import LossMessage
from shoal.train.loss.objective import call_of, loss_of_output
from shoal.train.run_state import RunState
from shoal.train.step.open_step import open_without_batch, reject_iterated_loaders, step_of
from shoal.train.step.report import OpenStep, PendingStep, StepReport


class StepEngine:
    """Makes the steps of a run, on the run's own state."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.loss = GlobalLoss(state)
        self._is_updating = False
        """Whether this engine lets the optimizer make a step, and not a loop of the script's."""

    # ---- forwards and backwards --------------------------------------------------------------------------------------

    def forward_backward(self, batch: Any) -> None:
        """All microbatches of this rank's share of a global batch; `update` is still to come."""
        state = self.state
        if state.composed.pipeline is not None:
            self._pipeline_step(step_of(state, batch))
            return
        for microbatch in self.microbatches(batch):
            self._forward_backward(microbatch)

    def local_gradients(self, step: OpenStep) -> None:
        """All microbatches of an open step, whose gradients are not averaged over ranks."""
        for index, microbatch in enumerate(step.microbatches):
            step.index = index
            self._begin(step, index)
            with self.state.composed.begin_microbatch(is_last=False):
                self._forward_backward(microbatch)

    def _forward_backward(self, microbatch: Any) -> None:
        state, head = self.state, self.state.composed.head
        assert state.open_step is not None
        try:  # a head that computes the loss and knows what that counts for has nothing to do in the backward
            with part("forward"), nullcontext() if head is None else head.with_grad_scale(self.factor):
                loss_sum = state.objective.loss_sum(state.model, microbatch, state.open_step.weight)
        except RuntimeError as error:
            explain_unused(error, state.model)
            explain_ungathered(error)
            raise
        self._backward(loss_sum)

    def microbatches(self, batch: Any) -> Iterator[Any]:
        """The batch in parts of `mb` samples; gradients are synchronised in the backward of the last one only."""
        composed = self.state.composed
        reject_own_loop(composed)
        step = step_of(self.state, batch)
        last = len(step.microbatches) - 1
        for index, microbatch in enumerate(step.microbatches):
            step.index = index
            self._begin(step, index)
            with composed.begin_microbatch(is_last=index == last):
                yield microbatch

    def backward(self, loss: Tensor | tuple[Tensor, Tensor | float]) -> None:
        """Backward of a loss of the script's own."""
        state = self.state
        reject_own_loop(state.composed)
        if state.open_step is None:
            reject_iterated_loaders(state)
            reject_unknown_batch(state.composed)
            open_without_batch(state, is_mean_of_means=state.policies.step.loss_mean == "microbatch")
        self._backward(read_loss(loss))

    def open_equal(self, number: int) -> OpenStep:
        """Open the step of a loop that opens no batch: a microbatch counts as one of `number`, whatever it weighs.

        The script's own random numbers stay its own: nothing is seeded.
        """
        reject_own_loop(self.state.composed)
        reject_unknown_batch(self.state.composed)
        return open_without_batch(self.state, number, is_mean_of_means=True)

    @contextmanager
    def equal_microbatch(self, step: OpenStep, *, is_last: bool) -> Iterator[None]:
        """Forward and backward of the next microbatch of such a step. There may be more of them, or fewer."""
        step.index = min(step.index + 1, len(step.microbatches) - 1)
        with self.state.composed.begin_microbatch(is_last=is_last):
            yield

    def factor(self) -> float:
        """The factor of a microbatch's loss sum in the gradient of the open step."""
        assert self.state.open_step is not None
        return self.loss.factor(self.state.open_step)

    def _backward(self, loss: Tensor | Loss) -> None:
        """[2] Backward of this microbatch's part of the global loss."""
        step = self.state.open_step
        assert step is not None
        if isinstance(loss, Loss) and not step.is_mean_of_means:
            step.kinds.add(loss.kind)
        total, is_alone = self.loss.total_weight(step), self.loss.is_alone(step)
        weight = total if is_alone else step.weight  # a mean that is alone is the loss, whatever its data weighs
        may_wait = self.state.report is None  # of the first step
        loss_sum = take(step, loss, max(step.index, 0), weight=weight, is_alone=is_alone, may_wait=may_wait)
        step.sums.append(loss_sum.detach() / total)
        is_counted = step.signals_with_loss is not None and not step.kinds
        if is_counted and step.index == len(step.microbatches) - 1 and step.message is None:
            # Beside the backward, in which a CPU waits for gradients anyway.
            step.message = LossMessage.send(self.loss.own(step), step.signals_with_loss, self.state.world.board)
        with part("backward"):
            (loss_sum * self.factor()).backward()

    def _pipeline_step(self, step: OpenStep) -> None:
        """All microbatches through the stages of this rank. Only the last stage sees a loss."""
        state = self.state
        assert state.composed.pipeline is not None
        self.loss.total_weight(step, 0)  # stages without a loss have to know what all ranks agreed on, too

        def loss(output: Any, number: int) -> Tensor:
            weight, total = step.weights[number], self.loss.total_weight(step, number)
            self._seed(state.steps_done, place(number))  # a loss that draws, draws what it drew for the call
            returned = loss_of_output(state.objective, output, step.microbatches[number], weight)
            is_alone = self.loss.is_alone(step)
            weight = total if is_alone else weight
            may_wait = state.report is None
            loss_sum = take(step, returned, number, weight=weight, is_alone=is_alone, may_wait=may_wait)
            step.sums.append(loss_sum.detach() / total)
            return loss_sum * self.loss.factor(step, number)

        def place(number: int) -> int:
            return step.offset + number * (state.plan.mb or 0)

        def call(number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
            self._seed(state.steps_done, place(number))
            return call_of(state.objective, step.microbatches[number])

        def begin(number: int, stage: int) -> None:
            self._begin(step, number, stage)

        calls = [call(number) for number in range(len(step.microbatches))]
        with state.split_logits_for_loss():
            state.composed.pipeline.step(MicrobatchFeed(calls, loss, begin))
        step.has_run = True

    def _begin(self, step: OpenStep, number: int, *stage: int) -> None:
        """Randomness in the model belongs to the samples, not to the rank that happens to compute them."""
        state = self.state
        self._seed(state.steps_done, step.offset + number * (state.plan.mb or 0), *stage)
        if state.composed.balance is not None:
            state.composed.balance.factor = functools.partial(self.loss.auxiliary_factor, step, number)
        if state.on_microbatch is not None:
            state.on_microbatch(number)

    def _seed(self, *place: int) -> None:
        """Not torch.manual_seed, which formats a stack trace for devices that are not there: half a millisecond."""
        state = self.state
        if state.mesh.degree("cp") > 1:  # the same samples, but other tokens of them
            place = (*place, state.mesh.coordinate["cp"])
        number = hashed_number(state.seed, *place)
        torch.default_generator.manual_seed(number)
        if state.device.type == "cuda":
            torch.cuda.manual_seed(number)

    # ---- the update --------------------------------------------------------------------------------------------------

    def update(self) -> StepReport:
        """[4] Clip, apply the optimizer and clear the gradients; or drop the step if the gradient is not finite."""
        state, composed = self.state, self.state.composed
        step = with_all_backwards(state.open_step)
        state.check_last_step()
        state.defers_count = self.loss.is_deferred(step)
        loss, message = self._send_loss(step)
        if composed.statistics is not None:
            composed.statistics.begin()
        composed.finish_gradients(state.steps_done)
        if state.defers_count:
            loss = self.loss.correct(step, loss)
        if state.on_gradients is not None:
            state.on_gradients()
        norm, is_applied = self._apply_optimizer()
        experts = composed.balance_experts(is_applied=is_applied)
        if message is not None:
            loss_of_all, signals = message.wait()
            state.agreed |= signals
            if not state.defers_count:
                loss = loss_of_all
        if composed.statistics is not None:
            composed.statistics.finish()
        keeps_nonfinite = state.updates.keeps_nonfinite
        report = StepReport(loss, norm, AsyncScalars(loss, norm), keeps_nonfinite=keeps_nonfinite, experts=experts)
        state.updates.pending = PendingStep(report, state.steps_done + 1, step.sums, composed.norms)
        if isinstance(is_applied, bool):
            state.check_last_step()
        self._end_step(report)
        return report

    def _send_loss(self, step: OpenStep) -> tuple[Tensor, LossMessage | None]:
        """This rank's part of the loss, and the sum of all of them on its way during the update."""
        defers_count, message = self.state.defers_count, step.message
        if message is not None:
            return message.loss, message
        loss = self.loss.own(step)
        if self.state.world.size > 1 and (not defers_count or step.signals_with_loss is not None):
            own = loss.clone() if defers_count else loss
            message = LossMessage.send(own, step.signals_with_loss)
        return loss, message

    def _apply_optimizer(self) -> tuple[Tensor, Tensor | bool]:
        """The global norm of the gradients, and whether the update was made."""
        state, composed = self.state, self.state.composed
        trained, scale = state.trained_parameters(), state.loss_scale.scale
        norm = composed.norm(trained, scale=scale, clip=state.updates.clip) / scale
        with self.updating():
            is_applied = state.updates.apply(state.optimizer, state.host_copies, trained, norm)
        composed.commit(is_applied)
        return norm, is_applied

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Steps of the optimizer inside are this engine's, and not those of a script's loop."""
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False

    def _end_step(self, report: StepReport) -> None:
        """Clear the gradients and count the step."""
        state, composed = self.state, self.state.composed
        state.optimizer.zero_grad(set_to_none=True)
        state.steps_done += 1
        report.overlap = composed.end_step(state.steps_done)
        state.open_step = None
        if composed.balance is not None:
            composed.balance.factor = self.factor_of_open_step
        state.report = report

    # ---- hooks of what is prepared -----------------------------------------------------------------------------------

    def before_optimizer(self, *_: Any) -> None:
        """Before a step of the optimizer: a loop that was left as it was for one device makes steps itself."""
        if not self._is_updating:
            reject_own_update(self.state.open_step)
            reject_iterated_loaders(self.state)

    def factor_of_open_step(self) -> float:
        """The factor of auxiliary losses in a script's own loop without `microbatches`."""
        step = self.state.open_step
        return 0.0 if step is None else self.loss.auxiliary_factor(step, 0)

    def counts_now(self) -> bool:
        """Whether the microbatch at hand has samples of this rank's own, and is no stand-in."""
        step = self.state.open_step
        return step is None or not step.is_stand_in(step.index)
