"""States of a rank of a plan, and what it sends of them, from dimensions: as fast as a search over plans needs it.

`exact.state_memory` and `exact.traffic` count what `verify` proves, parameter by parameter. A search needs the same
layout many times, with other microbatches, schedules and recompute, none of which change the states. So the count is
cached by the other words.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from shoal.blueprint.model_shapes import Sizes
from shoal.blueprint.plan import Plan, Precision, Schedule
from shoal.blueprint.schedules.table import V_SHAPED
from shoal.predict.exact.data_traffic import Exchanged, exchanged, gathers_of_stages
from shoal.predict.exact.shapes import shapes_of
from shoal.predict.exact.state_memory import Alike, Memory, held, memory_of
from shoal.predict.workload import Workload

ANY_SEQUENCE = 1
"""States do not depend on the length of a sequence."""


def exact_states(
    model: Workload, plan: Plan, *, place: int, weight: int, gradient: int, optimizer_states: float
) -> Memory:
    """States of the first rank at this place of the pipeline, under a resolved plan.

    `weight`, `gradient`: bytes of an element. `optimizer_states`: bytes that the optimizer keeps of one, in weights."""
    return _states(model, _Sharding.of(plan), place, plan.zero, plan.precision, (weight, gradient, optimizer_states))


def exact_exchange(model: Workload, plan: Plan, *, num_microbatches: int, place: int = 0) -> Exchanged:
    """Elements of parameters that the first rank at this place of the pipeline exchanges, under a resolved plan."""
    gathers = gathers_of_stages(plan, place=place, num_microbatches=num_microbatches) if plan.is_sharded else {}
    return _exchange(model, _Sharding.of(plan), place, plan.is_sharded, tuple(gathers.values()))


class _Sharding(NamedTuple):
    """The words of a plan that decide which elements a rank holds."""

    shards: int
    """Ranks that share a parameter; which axes they come from does not matter."""
    tp: int
    pp: int
    ep: int
    v: int
    order: Schedule

    @classmethod
    def of(cls, plan: Plan) -> _Sharding:
        shards = (plan.dp_shard or 1) * (plan.cp or 1) if plan.zero or (plan.ep or 1) > 1 else 1
        v = plan.v or 1
        order: Schedule = "interleaved" if v > 1 else "1f1b"
        if plan.schedule is not None and plan.schedule in V_SHAPED:
            order = plan.schedule
        return cls(shards, plan.tp or 1, plan.pp or 1, plan.ep or 1, v, order)

    def plan(self, zero: int | None, precision: Precision = "fp32") -> Plan:
        """The simplest plan that has them."""
        return Plan(
            dp_replicate=1,
            dp_shard=self.shards,
            cp=1,
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
            zero=zero,
            v=self.v,
            schedule=self.order if self.pp > 1 else None,
            precision=precision,
        )


@lru_cache(maxsize=2**14)
def _states(
    model: Workload,
    sharding: _Sharding,
    place: int,
    zero: int | None,
    precision: Precision,
    of_element: tuple[int, int, float],
) -> Memory:
    weight, gradient, optimizer_states = of_element
    plan = sharding.plan(zero, precision)
    sizes = Sizes.of(plan)
    if precision != "fp64":
        frozen = sizes.compute if model.lora else None
        sizes = replace(sizes, weight=weight, reduce=gradient, frozen=frozen)
    return memory_of(plan, _held(model, sharding, place, plan.is_sharded), sizes, optimizer_states)


@lru_cache(maxsize=2**14)
def _exchange(
    model: Workload, sharding: _Sharding, place: int, is_sharded: bool, gathers: tuple[int, ...]
) -> Exchanged:
    return exchanged(shapes_of(model, ANY_SEQUENCE), _held(model, sharding, place, is_sharded), gathers)


@lru_cache(maxsize=2**14)
def _held(model: Workload, sharding: _Sharding, place: int, is_sharded: bool) -> list[list[Alike]]:
    plan = sharding.plan(zero=1 if is_sharded else 0)
    rank = place * (plan.layout.world_size // plan.layout.pp)  # pp is the outermost axis
    return held(plan, shapes_of(model, ANY_SEQUENCE), rank=rank)
