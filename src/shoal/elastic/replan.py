"""The plan for the ranks that are left when a host is lost.

The global batch and the split of the model stay; only the number of data ranks changes. Which samples a step has and
how a checkpoint is stored do not depend on the plan, so losses stay equal to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shoal.blueprint.plan import Plan
from shoal.errors import ShoalError, listed


def plan_for_ranks(plan: Plan, world_size: int, batch: int) -> Plan:
    """The plan with fewer data ranks: shards are kept if they can be, else replicas, else neither.

    >>> print(plan_for_ranks(Plan.parse("dp_replicate=2 dp_shard=2 tp=2 mb=1"), 4, 32).brief())
    dp_shard=2 tp=2 zero=3 mb=1
    """
    for candidate in _candidates(plan):
        if fits(candidate, world_size, batch):
            return candidate.resolve(world_size)
    numbers = [each for each in range(1, 2 * world_size) if fits_some_way(plan, each, batch)]
    fewer = f"; it fits {listed(numbers)} ranks" if numbers else ""
    raise ShoalError(
        f"the plan {plan.brief()} with batch {batch} does not fit the {world_size} ranks that are left{fewer}",
        fix="--plan auto; or give the same command again when the lost host is back",
        code="N064",
    )


def fits_some_way(plan: Plan, world_size: int, batch: int) -> bool:
    """Whether `plan_for_ranks` finds a plan."""
    return any(fits(candidate, world_size, batch) for candidate in _candidates(plan))


def fits(plan: Plan, world_size: int, batch: int) -> bool:
    """Whether a plan can use exactly this many ranks for a global batch."""
    if plan.check(world_size):
        return False
    try:
        plan.resolve(world_size).num_microbatches(batch)
    except ShoalError:
        return False
    return True


def _candidates(plan: Plan) -> Iterator[Plan]:
    """The plan itself, and with other numbers of replicas and shards."""
    yield plan
    yield replace(plan, dp_replicate=None)
    zero = plan.fill(1).zero
    yield replace(plan, dp_replicate=None, dp_shard=None, zero=zero)
    if zero:
        yield replace(plan, dp_shard=None, zero=zero)
        yield replace(plan, dp_replicate=1, dp_shard=None, zero=zero)
