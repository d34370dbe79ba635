"""Checks of the batch: ranks and microbatches that must divide it."""

from __future__ import annotations

from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules.generate import check_schedule
from shoal.errors import Problem, ShoalError


def check_batch(plan: Plan, batch: int) -> list[Problem]:
    """Problems of the global batch with the ranks, the microbatches and the schedule."""
    try:
        num_microbatches = plan.num_microbatches(batch)
    except ShoalError as error:
        return list(error.problems)
    if plan.schedule is None:
        return []
    return check_schedule(plan.schedule, num_ranks=plan.layout.pp, v=plan.v or 1, num_microbatches=num_microbatches)
