"""Compute as DeepSpeed does at stage 0 in bf16, and at no other stage.

    when built    its optimizer makes a step with gradients of zero: Adam's bias correction is a step ahead, and weights
                  decay once more. The first forward still has the weights from before it
    backward      gradients are bfloat16: the sum over microbatches is rounded after each
    step          so is their mean over ranks, before the norm

Scripts keep their losses by it. `"data_types": {"grad_accum_dtype": "fp32"}`, which DeepSpeed rejects at this stage,
leaves it out; then losses are those of the stages 1, 2 and 3.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.numerics.gradients import gradients_of
from shoal.train.run import Run


class RoundedGradients:
    """Rounds the gradients of a run, and makes the step with gradients of zero before the first update.

    rates   the learning rate of each group when the optimizer was built, before a schedule has changed it
    """

    def __init__(self, run: Run, optimizer: Optimizer, rates: list[float]) -> None:
        self.run, self.optimizer, self.rates = run, optimizer, rates
        self.trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        # Before the hook of DDP, which sends a gradient as soon as it is there.
        self.hooks = [p.register_post_accumulate_grad_hook(self._round) for p in self.trained]
        run.on_gradients = self._after_mean

    def close(self) -> None:
        """Leave the model as it was."""
        self.run.on_gradients = None
        for hook in self.hooks:
            hook.remove()

    @torch.no_grad()
    def _round(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(parameter.grad.bfloat16())

    @torch.no_grad()
    def _after_mean(self) -> None:
        for gradient in gradients_of(self.trained):
            gradient.copy_(gradient.bfloat16())
        if self.run.steps_done == 0:
            self._step_of_zeros()

    def _step_of_zeros(self) -> None:
        groups = self.optimizer.param_groups
        gradients, rates = [p.grad for p in self.trained], [group["lr"] for group in groups]
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate
        with self.run.engine.updating():
            self.optimizer.step()
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
