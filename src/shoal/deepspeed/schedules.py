"""DeepSpeed's warm-up schedules, step for step.

    step of the optimizer      0     1     2     3   ...   N+1    N+2
    iteration                 -1     0     1     2   ...    N     N+1     before it
    WarmupLR, log            min   min   log 2 log 3 ...   max    max     (log of the iteration + 1, over log N)
    WarmupDecayLR            the same, then linearly to 0 at `total_num_steps`
    WarmupCosineLR           the same as ratios of the optimizer's rate, then a cosine to `cos_min_ratio`

The first two steps have the lowest rate, since the schedule is stepped once after the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import ShoalError

Rate = float | list[float]
"""One for all groups of parameters, or one for each."""


def _of_groups(optimizer: Optimizer, name: str, rate: Rate) -> list[float]:
    groups = len(optimizer.param_groups)
    rates = rate if isinstance(rate, list) else [rate] * groups
    if len(rates) != groups:
        what = f"{name} has {len(rates)} rates, and the optimizer {groups} groups of parameters"
        raise ShoalError(what, fix="one rate; or one for each group in model_parameters", code="E010")
    return rates


class WarmupLR:
    """From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps`, and then constant."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self.lowest = _of_groups(optimizer, "warmup_min_lr", warmup_min_lr)
        self.highest = own if warmup_max_lr is None else _of_groups(optimizer, "warmup_max_lr", warmup_max_lr)
        self.num_warmup, self.form = max(2, warmup_num_steps), warmup_type
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._apply()

    def get_lr(self) -> list[float]:
        """The rate of each group of parameters."""
        part = self.part(self.last_batch_iteration)
        return [low + (high - low) * part for low, high in zip(self.lowest, self.highest, strict=True)]

    def get_last_lr(self) -> list[float]:
        """The rate of each group, as it was set last."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def part(self, iteration: int) -> float:
        """The part of the way from the lowest to the highest rate."""
        return self.after_warmup(iteration) if iteration >= self.num_warmup else self.rise(iteration)

    def rise(self, iteration: int) -> float:
        """The part of the way during warm-up."""
        if iteration < 0:
            return 0.0
        if self.form == "linear":
            return iteration / self.num_warmup
        return math.log(iteration + 1) / math.log(self.num_warmup)

    def after_warmup(self, iteration: int) -> float:
        """The part of the way after warm-up."""
        return 1.0

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next iteration, or to the given one."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """The position, under DeepSpeed's name."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a position over."""
        self.last_batch_iteration = int(state["last_batch_iteration"])


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, and then linearly to 0 at `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rate = 0.0,
        warmup_max_lr: Rate = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def after_warmup(self, iteration: int) -> float:
        """The part of the way after warm-up."""
        return max(0.0, (self.total - iteration) / max(1.0, self.total - self.num_warmup))


class WarmupCosineLR(WarmupLR):
    """From `warmup_min_ratio` of the optimizer's rate to all of it, and then a cosine to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total, self.least, self.final = total_num_steps, warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, 0.0, None, warmup_num_steps, warmup_type, last_batch_iteration)

    def rise(self, iteration: int) -> float:
        """The ratio during warm-up. Before the first iteration it is 0, whatever `warmup_min_ratio` is."""
        return 0.0 if iteration < 0 else self.least + (1.0 - self.least) * super().rise(iteration)

    def after_warmup(self, iteration: int) -> float:
        """The ratio after warm-up."""
        progress = min(1.0, (iteration - self.num_warmup + 1) / max(1, self.total - self.num_warmup))
        return self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * progress)) / 2.0


SCHEDULES: dict[str, type[WarmupLR]] = {one.__name__: one for one in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}
"""The name in a config → the class."""
