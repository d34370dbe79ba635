"""A plan that compresses is not equal to one device, by design. What can be proven: the same plan without it is; and
what the first step's gradient loses on its way is no more than the method promises.

    ‖ compressed mean - mean ‖  ≤  bound x root of the mean over replicas of ‖ own gradient ‖²

Replicas' own gradients come from islands that never meet; the mean is the reference's. In the first step nothing is
owed from a step before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from torch import Tensor

from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.train.run import Run

NEVER = "local:1000000000"


@dataclass(frozen=True, slots=True)
class Bounded:
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
            f" own, {verdict} the {self.bound:.1e} that it may be (measured); all else here is of the plan without it"
        )


def without_compression(plan: Plan) -> Plan:
    """The plan whose equality can be proven."""
    return replace(plan, compress=None, sync=None)


def bounded(world: World, plan: Plan, prepare: Any, share: Any, exact: Mapping[str, Tensor] | None) -> Bounded | None:
    """One step of the plan with its compression. `exact`: the gradients of the reference, where they are known. Every
    rank calls it; what the main one returns counts."""
    if plan.compression is None or plan.layout.dp_replicate == 1:
        return None
    own = _one_step(Run(replace(plan, compress=None, sync=NEVER), clip=None, world=world), prepare, share)[1]
    compressed, _ = _one_step(Run(replace(plan, sync=None), clip=None, world=world), prepare, share)
    norms = world.all_gather_object(own)
    size = sqrt(sum(norm**2 for norm in norms) / len(norms))  # of ranks that share an island, all have its norm
    if exact is None:
        return None
    off = sum(float((compressed[name].double() - value.double()).norm() ** 2) for name, value in exact.items())
    return Bounded(f"compress={plan.compress}", sqrt(off) / size, plan.compression.error_bound)


def _one_step(run: Run, prepare: Any, share: Any) -> tuple[dict[str, Tensor], float]:
    """The gradients of the first step, whole, on the main rank; and the norm of those of this rank's replica."""
    prepare(run)
    gradients: dict[str, Tensor] = {}

    def look() -> None:
        whole = dict(run.composed.whole("gradient"))
        gradients.update({name: tensor for name, tensor in whole.items() if tensor is not None})

    run.on_gradients = look
    run.step(share(run))
    assert run.report is not None
    norm = float(run.report.grad_norm)
    run.composed.close()
    return gradients, norm
