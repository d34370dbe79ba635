"""Every plan that a model can run on a number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

from shoal.blueprint.description import Description
from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import CHOICES, DEGREES, VIRTUAL_STAGES, Plan
from shoal.blueprint.validation.check import check_plan
from shoal.blueprint.validation.description import Shapes


def legal_plans(
    world_size: int,
    *,
    description: Description,
    batch: int,
    sequence: int | None = None,
    features: Shapes | None = None,
    v: Sequence[int] = (2,),
) -> Iterator[Plan]:
    """Every legal plan of this many ranks over all six axes, from simple to composed.

    `v` are the stages per rank to try where a schedule leaves them open. No two plans compute the same. So zero is
    above 0 only where dp_shard x cp > 1. interleaved and looped begin at v=2, since with v=1 they are 1f1b and gpipe.
    Microbatches have one sequence, so that pipelines have as many of them as possible.
    """
    for plan in sorted(_all_plans(world_size, description, batch, v), key=_complexity):
        if not check_plan(plan, description=description, batch=batch, sequence=sequence, features=features):
            yield plan


def _all_plans(world_size: int, description: Description, batch: int, v: Sequence[int]) -> Iterator[Plan]:
    """Every distinct plan of this many ranks, except those that the degrees alone rule out for this model."""
    for degrees in _all_degrees(world_size, description, batch):
        pp, tp, cp, ep = (degrees[axis] for axis in ("pp", "tp", "cp", "ep"))
        shares = degrees["dp_shard"] * cp > 1
        zeros = (*((0,) if degrees["dp_shard"] == ep == 1 else ()), *((1, 2, 3) if shares else ()))
        orders = list(_orders(v)) if pp > 1 else [{}]
        contexts = CHOICES["context"] if cp > 1 else (None,)
        for zero, context, order, sp in product(zeros, contexts, orders, (False, True) if tp > 1 else (None,)):
            values = {**degrees, **order, "context": context, "zero": zero, "sp": sp, "mb": 1}
            yield Plan.of(values).resolve(world_size)


def _all_degrees(world_size: int, description: Description, batch: int) -> Iterator[dict[str, int]]:
    """Degrees that fill the world. There are thousands, so cheap rules drop most before a plan is built."""
    num_experts, heads = description.num_experts or 1, (description.num_heads or 0, description.num_kv_heads or 0)
    for dp_replicate, dp_shard, cp, tp, pp in product(divisors(world_size), repeat=5):
        degrees = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp, "pp": pp}
        is_possible = (
            prod(degrees.values()) == world_size
            and batch % (dp_replicate * dp_shard) == 0
            and (cp == 1 or description.positions is not None)
            and (tp == 1 or (bool(description.splits) and not any(number % tp for number in heads)))
            and (pp == 1 or pp <= len(description.blocks))
        )
        for ep in divisors(dp_shard * cp) if is_possible else ():
            if num_experts % ep == 0:
                yield {**degrees, "ep": ep}


def _orders(v: Sequence[int]) -> Iterator[dict[str, Any]]:
    for word in CHOICES["schedule"]:
        several = {1, *v} if word == "zb" else {stages for stages in v if stages > 1}
        for stages in sorted({VIRTUAL_STAGES[word]} if word in VIRTUAL_STAGES else several):
            yield {"schedule": word, "v": stages}


def _complexity(plan: Plan) -> tuple[Any, ...]:
    """Sort key: fewer axes first, then by axis and by the values on it."""
    degrees = tuple(getattr(plan, axis) for axis in DEGREES)
    used = tuple(number for number, degree in enumerate(degrees) if degree > 1)
    context = CHOICES["context"].index(plan.context) if plan.context else -1
    schedule = CHOICES["schedule"].index(plan.schedule) if plan.schedule else -1
    return len(used), used, degrees, plan.zero, context, schedule, plan.v, plan.sp or False
