"""Lion: the sign of an average of gradients, with one moment for each parameter (Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import Problem, raise_if
from shoal.numerics.local_tensor import to_local


class Lion(Optimizer):
    """Update each parameter by the sign of its averaged gradient. Every element is updated by itself, so it is right on
    every layout.

        update = sign(beta1 m + (1 - beta1) g)       m = beta2 m + (1 - beta2) g

    params        parameters, or groups of them
    lr            the learning rate; usually a third to a tenth of AdamW's
    betas         of the update, and of the moment
    weight_decay  decoupled, as AdamW's; usually three to ten times of AdamW's
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and reject invalid options."""
        super().add_param_group(param_group)
        raise_if(_wrong(self.param_groups[-1]), title="shoal.Lion")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; a closure is called first, as torch's optimizers do."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not updated:
                continue
            for parameter in updated:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            _update(
                [to_local(parameter) for parameter in updated],
                [to_local(parameter.grad) for parameter in updated],
                [to_local(self.state[parameter]["exp_avg"]) for parameter in updated],
                group,
            )
        return loss


def _update(weights: list[Tensor], gradients: list[Tensor], moments: list[Tensor], group: dict[str, Any]) -> None:
    """One step of many tensors, in few kernels."""
    (first, second), lr = group["betas"], float(group["lr"])
    averages = torch._foreach_lerp(moments, gradients, 1 - first)
    torch._foreach_sign_(averages)
    torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
    torch._foreach_add_(weights, averages, alpha=-lr)
    torch._foreach_lerp_(moments, gradients, 1 - second)


def _wrong(group: dict[str, Any]) -> Iterator[Problem]:
    for name in ("lr", "weight_decay"):
        if not float(group[name]) >= 0.0:
            yield Problem("T036", f"{name} must be 0 or more, got {group[name]}", f"{name}=0.0")
    if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        yield Problem("T036", f"betas must be two numbers from 0 to below 1, got {group['betas']}", "betas=(0.9, 0.99)")
