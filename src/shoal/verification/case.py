"""What is to be verified: a model, its batches and a plan, in a form that every process can be given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.blueprint.plan import Plan, Precision
from shoal.errors import ShoalError

TOLERANCES = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""Precision → the largest relative difference that rounding is blamed for. In float64 a wrong layout is 1e-2 off and a
right one 1e-13, so nobody has to argue about 1e-10. In lower precision the noise is real: sums in another order differ
by the precision's own rounding, times what the model makes of it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One verification. Everything in it is the same for the reference and for every rank of the plan."""

    build: Callable[[], nn.Module]
    """Makes the model; its values are drawn from the seed if the model says how, and must be the same otherwise."""
    batches: Sequence[Any]
    """Global batches, one for each step that is compared; the last one serves the steps that are counted."""
    plan: Plan
    """Resolved."""
    loss: Any = None
    """None: cross-entropy. Else loss(model, batch), the mean over the batch."""
    seed: int = 0
    lr: float = 1e-2
    clip: float | None = 0.5
    device: str = "cpu"
    tolerance: float = 1e-10
    compressed: Plan | None = None
    """The plan as it was asked for, if it compresses what replicas send each other; `plan` is without that then."""
    threads: int | None = None
    replaced: Precision | None = None
    """The precision of the plan as it was asked for, if it is a lower one than it is verified in."""

    unseen: tuple[str, ...] = ()
    """Settings of the recipe, each with its value, that `shoal train` would heed and a verification does not."""

    @property
    def world_size(self) -> int:
        """How many processes the plan needs."""
        return self.plan.layout.world_size


def in_precision(plan: Plan, precision: str | None, device: str) -> Plan:
    """The plan in the precision that a verification runs in: float64 on the CPU, the plan's own on a GPU."""
    chosen = precision or ("fp64" if device == "cpu" else plan.precision)
    if chosen not in TOLERANCES:
        raise ShoalError(f"precision {chosen!r} cannot be verified in", fix=f"--precision {', '.join(TOLERANCES)}")
    return Plan.of({**plan.to_mapping(), "precision": chosen})


def replaced_precision(asked: Plan, plan: Plan) -> Precision | None:
    """The precision that was asked for, if it is one that rounds and another one is verified in."""
    is_replaced = asked.precision in ("bf16", "fp16", "fp8") and asked.precision != plan.precision
    return asked.precision if is_replaced else None
