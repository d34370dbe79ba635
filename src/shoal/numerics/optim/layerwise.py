"""LARS and LAMB: the step of each tensor in proportion to its norm, for batches of many thousands (You et al.).

Norms are those of whole tensors: under zero=1..3 the squares of all tensors are summed over the shards in one message.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import Problem, raise_if
from shoal.numerics.local_tensor import to_local
from shoal.numerics.optim.adamw import reject_closure
from shoal.numerics.optim.shard_norms import full_norms


class Layerwise(Optimizer):
    """What LARS and LAMB share: a direction for each tensor, and a step along it by the ratio of two norms."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and reject invalid options."""
        super().add_param_group(param_group)
        raise_if(_wrong(self.param_groups[-1]), title=f"shoal.{type(self).__name__}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A closure is rejected."""
        reject_closure(self, closure)
        trained = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not trained:
            return
        parameters = [parameter for parameter, _ in trained]
        weights = [to_local(parameter) for parameter in parameters]
        directions = [self._direction(*each) for each in trained]
        norms = zip(*full_norms(parameters, weights, directions), strict=True)
        for (parameter, group), weight, direction, (of_weight, of_direction) in zip(
            trained, weights, directions, norms, strict=True
        ):
            is_scaled = group["adapts"] and of_weight > 0 and of_direction > 0
            ratio = self._ratio(group, of_weight, of_direction) if is_scaled else 1.0
            self._move(parameter, group, weight, direction, ratio)

    @abstractmethod
    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's shard of the direction, of which the norm is taken."""

    @abstractmethod
    def _ratio(self, group: dict[str, Any], of_weight: float, of_direction: float) -> float:
        """The factor of the learning rate, from the norms of the whole tensors."""

    @abstractmethod
    def _move(self, parameter: Tensor, group: dict[str, Any], weight: Tensor, direction: Tensor, ratio: float) -> None:
        """Change this rank's shard of a weight."""


class LAMB(Layerwise):
    """Adam's direction, as long as the weight (You et al. 2020).

        r = m / (√v + eps) + weight_decay w       w = w - lr ‖w‖ / ‖r‖ r

    params        parameters, or groups; one with "adapts": False has no ratio of norms, as usual for norms and biases
    lr            the learning rate
    betas, eps    of the moments m and v, whose bias is corrected
    weight_decay  inside of the direction, as in the paper
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapts": True})

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        assert parameter.grad is not None
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        weight, gradient, first, second = map(to_local, tensors)
        beta1, beta2 = group["betas"]
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1, correction2 = (1 - beta ** float(state["step"]) for beta in (beta1, beta2))
        root = (second / correction2).sqrt_().add_(group["eps"])
        direction: Tensor = (first / correction1).div_(root)
        return direction.add_(weight, alpha=group["weight_decay"])

    def _ratio(self, group: dict[str, Any], of_weight: float, of_direction: float) -> float:
        return of_weight / of_direction

    def _move(self, parameter: Tensor, group: dict[str, Any], weight: Tensor, direction: Tensor, ratio: float) -> None:
        weight.add_(direction, alpha=-float(group["lr"]) * ratio)


class LARS(Layerwise):
    """SGD with momentum whose step is in proportion to the norm of the weight (You et al. 2017).

        v = momentum v + lr trust ‖w‖ / (‖g‖ + weight_decay ‖w‖) (g + weight_decay w)       w = w - v

    params        parameters, or groups; one with "adapts": False has no ratio of norms, as usual for norms and biases
    lr            the learning rate
    momentum      of the steps v
    weight_decay  an L2 penalty
    trust         the coefficient η of the paper
    """

    def __init__(
        self, params: Any, *, lr: float, momentum: float = 0.9, weight_decay: float = 1e-4, trust: float = 1e-3
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "adapts": True}
        super().__init__(params, options)

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        assert parameter.grad is not None
        return to_local(parameter.grad)

    def _ratio(self, group: dict[str, Any], of_weight: float, of_direction: float) -> float:
        return float(group["trust"]) * of_weight / (of_direction + float(group["weight_decay"]) * of_weight)

    def _move(self, parameter: Tensor, group: dict[str, Any], weight: Tensor, direction: Tensor, ratio: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        step = direction.add(weight, alpha=group["weight_decay"])
        moved = to_local(state["momentum_buffer"]).mul_(group["momentum"])
        weight.sub_(moved.add_(step, alpha=float(group["lr"]) * ratio))


def _wrong(group: dict[str, Any]) -> Iterator[Problem]:
    for name in ("lr", "weight_decay", "eps", "trust"):
        if name in group and not float(group[name]) >= 0.0:
            yield Problem("T036", f"{name} must be 0 or more, got {group[name]}", f"{name}=0.0")
    if "betas" in group and not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        what = f"betas must be two numbers from 0 to below 1, got {group['betas']}"
        yield Problem("T036", what, "betas=(0.9, 0.999)")
    if "momentum" in group and not 0.0 <= group["momentum"] < 1.0:
        yield Problem("T036", f"momentum must be a number from 0 to below 1, got {group['momentum']}", "momentum=0.9")
