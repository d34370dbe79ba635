"""From the gradients of a step to its update: check, clip, apply.

One number decides, the global norm, which is the same on every rank. Where it is checked:

on the host     the host reads it, and waits for the step: on a CPU, under fp16 (whose next step depends on it), with an
                optimizer that the script brings, and where optimizer or parameters live in host memory
on the device   a fused optimizer reads it there, and drops the update by itself; the host reads it after the next step
                was queued
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.world import World
from shoal.errors import RunFailed
from shoal.numerics.gradients import LossScale, clip_coefficient, gradients_of, scale_
from shoal.numerics.local_tensor import to_local
from shoal.numerics.offload.host_copies import HostCopies
from shoal.numerics.optim.build import step_scaled, takes_scale
from shoal.parallel.policies import OnNan, StepPolicy
from shoal.train.step.nonfinite import nonfinite_places
from shoal.train.step.report import PendingStep


@dataclass(kw_only=True)
class Updates:
    """Updates of the parameters, with clipping, loss scale and the check for numbers that are not finite."""

    world: World
    loss_scale: LossScale
    clip: float | None
    on_nan: OnNan
    defers_nan_check: bool | None = None
    """Whether the optimizer checks on the device that gradients are finite. None: not decided yet."""
    has_updated: bool = False
    """Whether the optimizer has made a step of this run."""
    pending: PendingStep | None = None
    """The last step, until the host has read whether its gradient was finite."""

    @classmethod
    def of(cls, policy: StepPolicy, world: World, *, scales_loss: bool) -> Updates:
        """As a policy says, under a precision that scales losses or does not."""
        scale = LossScale(policy.loss_scale, policy.loss_scale_window) if scales_loss else LossScale()
        return cls(world=world, loss_scale=scale, clip=policy.clip, on_nan=policy.on_nan)

    @property
    def keeps_nonfinite(self) -> bool:
        """Whether updates are made whatever the gradient is."""
        return self.on_nan == "ignore" and not self.loss_scale.is_dynamic

    def apply(
        self, optimizer: Optimizer, host_copies: HostCopies | None, trained: list[nn.Parameter], norm: Tensor
    ) -> Tensor | bool:
        """Clip and update, unless a gradient is not finite. Returns whether it was done; as a number on the device, if
        it was checked there."""
        if self.defers_nan_check is None:
            is_elsewhere = host_copies is not None or any(p.device != self.world.device for p in trained)
            can = self.world.device.type == "cuda" and not is_elsewhere and takes_scale(optimizer)
            self.defers_nan_check = can and not self.loss_scale.is_dynamic
        # The first one is checked here: an optimizer that makes its states while it drops a step leaves them unfilled.
        if self.defers_nan_check and self.has_updated:
            return self._apply_on_device(optimizer, trained, norm)
        is_applied = self.keeps_nonfinite or math.isfinite(norm)
        if is_applied:
            self._scale_gradients(trained, norm)
            (host_copies or optimizer).step()
            self.loss_scale.succeeded()
            self.has_updated = True
        return is_applied

    def _apply_on_device(self, optimizer: Optimizer, trained: list[nn.Parameter], norm: Tensor) -> Tensor:
        is_finite = torch.ones_like(norm) if self.keeps_nonfinite else norm.isfinite().to(norm.dtype)
        divisor = None
        if self.clip is not None and norm.dtype == torch.float32:
            divisor = 1.0 / clip_coefficient(norm, self.clip)
        else:  # a divisor is a float32, and would leave its mark on gradients in float64
            self._scale_gradients(trained, norm)
        step_scaled(optimizer, divisor=divisor, is_dropped=1.0 - is_finite)
        return is_finite

    def _scale_gradients(self, trained: list[nn.Parameter], norm: Tensor) -> None:
        """Undo the loss scale and clip, in one pass over the gradients."""
        is_within = self.clip is None or (norm.device.type == "cpu" and float(norm) < 0.999 * self.clip - 1e-6)
        if is_within and self.loss_scale.scale == 1.0:  # by 1, to the last bit
            return
        coefficient = torch.ones_like(norm) if self.clip is None else clip_coefficient(norm, self.clip)
        scale_([to_local(gradient) for gradient in gradients_of(trained)], coefficient / self.loss_scale.scale)

    def check_last_step(self) -> None:
        """Wait for the last step, and check its gradient."""
        pending, self.pending = self.pending, None
        if pending is not None and pending.report.was_skipped:
            pending.report.note = self._handle_nonfinite(pending)

    def _handle_nonfinite(self, pending: PendingStep) -> str:
        """Every rank is here together, because the norm is the same number everywhere, and so is the loss.

        A gradient that overflows is what the loss scale is for. It cannot cure a loss that is not finite itself.
        """
        loss, _ = pending.report.numbers.read()
        if self.loss_scale.is_dynamic and not self.loss_scale.is_exhausted and math.isfinite(loss):
            self.loss_scale.overflowed()
            return ""
        text = nonfinite_places(self.world, pending)
        if self.on_nan == "stop":
            raise RunFailed(
                text, fix="lower --optim.lr, look at that batch, or --run.on_nan skip to drop such steps", code="T032"
            )
        return text
