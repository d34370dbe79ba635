"""A verification case: a model, its batches and a plan, in a form that can be sent to every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.blueprint.plan import Plan, Precision
from shoal.errors import raise_if
from shoal.parallel.data.shard_policy import DEFAULT_SHARDING, ShardPolicy
from shoal.verification.options import check_verified_precision


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

    shard: ShardPolicy = DEFAULT_SHARDING
    """The units that are gathered, and how early; reductions stay exact."""

    not_verified: tuple[str, ...] = ()
    """Settings of the recipe, each with its value, that `shoal train` uses and a verification does not."""

    @property
    def world_size(self) -> int:
        """Number of processes of the plan."""
        return self.plan.layout.world_size


def in_precision(plan: Plan, precision: str | None, device: str) -> Plan:
    """The plan in the precision of the verification: float64 on the CPU, the plan's own on a GPU."""
    chosen = precision or ("fp64" if device == "cpu" else plan.precision)
    raise_if(check_verified_precision(chosen))
    return Plan.of({**plan.to_mapping(), "precision": chosen})


def replaced_precision(requested: Plan, plan: Plan) -> Precision | None:
    """The requested precision, if it is a low one and the verification uses another."""
    is_replaced = requested.precision in ("bf16", "fp16", "fp8") and requested.precision != plan.precision
    return requested.precision if is_replaced else None
