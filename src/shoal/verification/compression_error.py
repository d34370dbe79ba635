"""Measure the error of gradient compression in the first step, and compare it with the bound of the method.

    ‖ compressed mean - mean ‖  ≤  bound x root of the mean over replicas of ‖ own gradient ‖²

The mean is the reference's. In the first step there is no residual of an earlier one. A plan with compression is not
equal to one process by design; the same plan without compression must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from torch import Tensor

from shoal.blueprint.plan import Plan
from shoal.train.run import Run


@dataclass(frozen=True, slots=True)
class CompressionError:
    """The error of compression in the gradient of one step."""

    method: str
    error: float
    """The norm of the error, relative to the replicas' own gradients."""
    bound: float
    """The largest error that the method allows."""

    @property
    def is_within_bound(self) -> bool:
        """Whether the error is at most the bound."""
        return self.error <= self.bound

    def __str__(self) -> str:
        verdict = "within" if self.is_within_bound else "NOT within"
        return (
            f"{self.method} is not equal by design; the relative error of its first gradient is {self.error:.1e},"
            f" {verdict} the bound {self.bound:.1e} (measured); differences below are without compression"
        )


def without_compression(plan: Plan) -> Plan:
    """The plan without compression and local SGD, which must equal one process."""
    return replace(plan, compress=None, sync=None)


def compression_error(run: Run, share: Any, exact: Mapping[str, Tensor] | None) -> CompressionError | None:
    """Measure the first step of a run with compression. `exact`: the gradients of the reference, on the main rank. All
    ranks call it; the main rank's result counts. None: there is nothing to compress on one replica."""
    composed, gradients, own = run.composed, dict[str, Tensor](), 0.0
    plan = run.plan
    if composed.reducer is None or plan.compression is None:
        return None

    def add(name: str, gradient: Tensor) -> None:
        nonlocal own
        if composed.is_owner(name, besides=composed.sync_axes):
            own += float(gradient.norm() ** 2)

    def look() -> None:
        full = dict(composed.full_tensors("gradient"))
        gradients.update({name: tensor for name, tensor in full.items() if tensor is not None})

    composed.reducer.on_own, run.on_gradients = add, look
    run.step(share)
    composed.reducer.on_own = run.on_gradients = None
    size = sqrt(run.world.all_reduce_host([own]).wait()[0] / composed.reducer.averager.comm_threads.size)
    if exact is None:
        return None
    error = sum(float((gradients[name].double() - value.double()).norm() ** 2) for name, value in exact.items())
    return CompressionError(f"compress={plan.compress}", sqrt(error) / size, plan.compression.error_bound)
