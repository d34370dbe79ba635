"""A plan that compresses is not equal to one device, by design. What can be proven: the same plan without it is; and
what the first step's gradient loses on its way is no more than the method promises.

    ‖ compressed mean - mean ‖  ≤  bound x root of the mean over replicas of ‖ own gradient ‖²

The mean is the reference's. In the first step nothing is owed from a step before.
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
    """What compression did to the gradient of one step."""

    words: str
    error: float
    """Its norm, as a part of the replicas' own gradients."""
    bound: float
    """The most that the method allows."""

    @property
    def holds(self) -> bool:
        """Whether it is within what the method allows."""
        return self.error <= self.bound

    def __str__(self) -> str:
        verdict = "within" if self.holds else "NOT within"
        return (
            f"{self.words} is not equal by design: its first gradient is {self.error:.1e} off, as a part of replicas'"
            f" own, {verdict} the {self.bound:.1e} that it may be (measured); differences below are without it"
        )


def without_compression(plan: Plan) -> Plan:
    """The plan whose equality can be proven."""
    return replace(plan, compress=None, sync=None)


def compression_error(run: Run, share: Any, exact: Mapping[str, Tensor] | None) -> CompressionError | None:
    """The first step of a run that compresses gradients. `exact`: those of the reference, where they are known. Every
    rank calls it; what the main one returns counts. None: it compresses nothing, since there is nobody to send to."""
    composed, gradients, own = run.composed, dict[str, Tensor](), 0.0
    plan = run.plan
    if composed.reducer is None or plan.compression is None:
        return None

    def add(name: str, gradient: Tensor) -> None:
        nonlocal own
        if composed.is_owner(name, besides=composed.meeting_axes):
            own += float(gradient.norm() ** 2)

    def look() -> None:
        whole = dict(composed.whole("gradient"))
        gradients.update({name: tensor for name, tensor in whole.items() if tensor is not None})

    composed.reducer.on_own, run.on_gradients = add, look
    run.step(share)
    composed.reducer.on_own = run.on_gradients = None
    size = sqrt(run.world.all_reduce_host([own]).wait()[0] / composed.reducer.averager.comm_threads.size)
    if exact is None:
        return None
    off = sum(float((gradients[name].double() - value.double()).norm() ** 2) for name, value in exact.items())
    return CompressionError(f"compress={plan.compress}", sqrt(off) / size, plan.compression.error_bound)
