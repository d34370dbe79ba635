"""A verification case: a model, its batches and a plan, in a form that can be sent to every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.blueprint.plan import Plan, Precision
from shoal.errors import Problem, raise_if

TOLERANCES = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 5e-2, "fp16": 5e-2}
"""Precision → the largest relative difference that counts as rounding. In float64 the difference of a wrong layout is
about 1e-2 and that of a right one 1e-13, so 1e-10 separates them. In lower precision, sums in another order differ by
the rounding of the precision, amplified by the model."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One verification. Everything in it is the same for the reference and for every rank of the plan."""

    build: Callable[[], nn.Module]
    """Build the model. Values come from the seed if the model has init rules; else they must be the same each time."""
    batches: Sequence[Any]
    """Global batches, one for each compared step; the last one is also used for the counted steps."""
    plan: Plan
    """The resolved plan that is compared, without compression and local SGD."""
    loss: Any = None
    """None: cross-entropy. Else loss(model, batch), the mean over the batch."""
    seed: int = 0
    lr: float = 1e-2
    clip: float | None = 0.5
    device: str = "cpu"
    tolerance: float = 1e-10
    compressed: Plan | None = None
    """The requested plan, if it has compression or local SGD, which `plan` has not."""
    threads: int | None = None
    replaced: Precision | None = None
    """The precision of the requested plan, if it is lower than that of the verification."""

    not_verified: tuple[str, ...] = ()
    """Settings of the recipe, each with its value, that `shoal train` uses and a verification does not."""

    @property
    def world_size(self) -> int:
        """Number of processes of the plan."""
        return self.plan.layout.world_size


def in_precision(plan: Plan, precision: str | None, device: str) -> Plan:
    """The plan in the precision of the verification: float64 on the CPU, the plan's own on a GPU."""
    chosen = precision or ("fp64" if device == "cpu" else plan.precision)
    raise_if(check_precision(chosen))
    return Plan.of({**plan.to_mapping(), "precision": chosen})


def check_precision(precision: str | None) -> Iterator[Problem]:
    """The problem of a precision that has no tolerance. None: the plan's, or float64."""
    if precision is not None and precision not in TOLERANCES:
        known = ", ".join(TOLERANCES)
        yield Problem("R050", f"--precision must be one of {known}, got {precision!r}", "--precision fp64")


def replaced_precision(requested: Plan, plan: Plan) -> Precision | None:
    """The requested precision, if it is a low one and the verification uses another."""
    is_replaced = requested.precision in ("bf16", "fp16", "fp8") and requested.precision != plan.precision
    return requested.precision if is_replaced else None
