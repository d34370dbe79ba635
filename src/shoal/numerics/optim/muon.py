"""Muon (Jordan et al. 2024): momentum, orthogonalized, for matrices; AdamW for everything else, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import Problem, listed, raise_if
from shoal.numerics.local_tensor import to_local
from shoal.numerics.optim.adamw import AdamW, reject_closure
from shoal.numerics.optim.newton_schulz import compute_dtype, orthogonalized
from shoal.numerics.optim.whole_matrices import apply_to_whole

Algorithm = Literal["muon", "adamw"]
RMS_OF_ADAMW = 0.2
"""The root mean square of AdamW's updates, which Muon's get too (Liu et al. 2025): one learning rate serves both."""


class Muon(AdamW):
    """Orthogonalized momentum for the matrices of hidden layers, AdamW for embeddings, heads, norms and biases.

        m = momentum m + (1 - momentum) g       update = orthogonalized((1 - momentum) g + momentum m)
        w = w - lr weight_decay w - lr 0.2 √max(rows, columns) update

    Whole matrices are orthogonalized, also under zero=1..3: each on one rank, which gets all of its rows. Plans with tp
    or ep are rejected. The iteration computes in bfloat16, and in float64 for weights in float64.

    params               matrices; or groups, of which those with "algorithm": "adamw" are AdamW's, and the others
                         Muon's. `shoal.muon_groups(model)` returns groups
    lr                   of both, as AdamW's
    momentum, nesterov   of Muon; nesterov False: update = orthogonalized(m)
    betas, eps           of AdamW
    weight_decay         decoupled, of both

    >>> weight, bias = torch.nn.Parameter(torch.eye(4)), torch.nn.Parameter(torch.zeros(4))
    >>> optimizer = Muon([{"params": [weight]}, {"params": [bias], "algorithm": "adamw"}], lr=1e-3)
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "state_dtype": "fp32", "seed": 0}
        own = {"algorithm": "muon", "momentum": momentum, "nesterov": nesterov}
        Optimizer.__init__(self, params, {**options, **own})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and reject invalid options."""
        super().add_param_group(param_group)
        raise_if(_wrong(self.param_groups[-1]), title="shoal.Muon")

    _step_supports_amp_scaling = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A closure is rejected."""
        reject_closure(self, closure)
        self._step_groups([group for group in self.param_groups if group["algorithm"] == "adamw"])
        # All groups at once: the matrices of a step are exchanged in one message.
        matrices = [
            (parameter, group)
            for group in self.param_groups
            if group["algorithm"] == "muon"
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        parameters = [parameter for parameter, _ in matrices]
        directions = apply_to_whole(orthogonalized, parameters, [self._average(*each) for each in matrices])
        for (parameter, group), direction in zip(matrices, directions, strict=True):
            lr, weight = float(group["lr"]), to_local(parameter)
            weight.mul_(1 - lr * group["weight_decay"])
            weight.add_(direction, alpha=-lr * RMS_OF_ADAMW * math.sqrt(max(parameter.shape)))

    def _average(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum of this rank's shard; return what is orthogonalized, in the dtype of that."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient, average = to_local(parameter.grad), to_local(state["momentum_buffer"])
        average.lerp_(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        return ahead.to(compute_dtype(parameter.dtype))


def _wrong(group: dict[str, Any]) -> Iterator[Problem]:
    if group["algorithm"] not in get_args(Algorithm):
        names = listed(map(repr, get_args(Algorithm)))
        yield Problem("T036", f"algorithm must be {names}, got {group['algorithm']!r}", '"algorithm": "adamw"')
    if not 0.0 <= group["momentum"] < 1.0:
        yield Problem("T036", f"momentum must be a number from 0 to below 1, got {group['momentum']}", "momentum=0.95")
    other = next((parameter for parameter in group["params"] if parameter.ndim != 2), None)
    if group["algorithm"] == "muon" and other is not None:
        yield Problem(
            "T070",
            f"Muon orthogonalizes matrices, got a parameter of the shape {list(other.shape)}",
            'shoal.Muon(shoal.muon_groups(model), lr=...); or a group with "algorithm": "adamw"',
        )
