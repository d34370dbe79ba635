"""Bytes of states on a rank of a plan, from dimensions: the exact count, as fast as a search over plans needs it.

`exact.memory` counts what `verify` proves, parameter by parameter. A search needs the same layout many times, with
other microbatches, schedules and recompute, none of which change the states. So the count is cached by the other words.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from shoal.blueprint.model_shapes import Sizes
from shoal.blueprint.plan import Plan, Precision, Schedule
from shoal.blueprint.schedules.table import V_SHAPED
from shoal.predict.exact.memory import Memory, memory
from shoal.predict.exact.shapes import shapes_of
from shoal.predict.workload import Workload

ANY_SEQUENCE = 1
"""States do not depend on the length of a sequence."""


def exact_states(
    model: Workload, plan: Plan, *, place: int, weight: int, gradient: int, optimizer_states: float
) -> Memory:
    """States of the first rank at this place of the pipeline, under a resolved plan.

    `weight`, `gradient`: bytes of an element. `optimizer_states`: bytes that the optimizer keeps of one, in weights."""
    schedule = plan.schedule if plan.schedule in V_SHAPED else None
    # States depend on the number of ranks that share them, not on the axes that these ranks come from.
    shards = (plan.dp_shard or 1) * (plan.cp or 1)
    degrees = (shards if plan.zero or (plan.ep or 1) > 1 else 1, plan.tp or 1, plan.pp or 1, plan.ep or 1)
    of_element = (weight, gradient, optimizer_states)
    return _states(model, degrees, plan.zero, plan.v, schedule, place, plan.precision, of_element)


@lru_cache(maxsize=2**14)
def _states(
    model: Workload,
    degrees: tuple[int, int, int, int],
    zero: int | None,
    v: int | None,
    schedule: Schedule | None,
    place: int,
    precision: Precision,
    of_element: tuple[int, int, float],
) -> Memory:
    weight, gradient, optimizer_states = of_element
    order: Schedule = schedule or ("interleaved" if (v or 1) > 1 else "1f1b")
    shards, tp, pp, ep = degrees
    plan = Plan(
        dp_replicate=1,
        dp_shard=shards,
        cp=1,
        tp=tp,
        pp=pp,
        ep=ep,
        zero=zero,
        v=v,
        schedule=order if pp > 1 else None,
        precision=precision,
    )
    sizes = Sizes.of(plan)
    if precision != "fp64":
        sizes = replace(sizes, weight=weight, reduce=gradient)
    layout = plan.layout
    rank = place * (layout.world_size // layout.pp)  # pp is the outermost axis
    return memory(plan, shapes_of(model, ANY_SEQUENCE), rank=rank, sizes=sizes, optimizer_states=optimizer_states)
