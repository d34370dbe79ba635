"""Checks of the batch: ranks and microbatches that must divide it."""

from __future__ import annotations

from dataclasses import replace

from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import Plan
from shoal.blueprint.plan_conflicts import multiples_around
from shoal.blueprint.schedules.schedule_orders import check_microbatches, legal_microbatches
from shoal.errors import Problem, ShoalError, listed


def check_batch(plan: Plan, batch: int, *, for_any_layout: bool = False) -> list[Problem]:
    """Problems of the global batch with the ranks, the microbatches and the schedule.

    `for_any_layout`: the fix is a batch that any number of data ranks divides, since the degrees will change.
    """
    try:
        num_microbatches = plan.num_microbatches(batch)
    except ShoalError as error:
        if not for_any_layout:
            return list(error.problems)
        near = multiples_around(batch, (plan.mb or 1) * plan.layout.world_size)
        return [replace(problem, fix=f"--data.global_batch {listed(near)}") for problem in error.problems]
    if plan.schedule is None:
        return []
    found = check_microbatches(plan.schedule, plan.layout.pp, num_microbatches)
    return [replace(problem, fix=_other_microbatches(plan, batch)) for problem in found]


def _other_microbatches(plan: Plan, batch: int) -> str:
    """Values of `mb`, or of the global batch, that give the schedule a number of microbatches that it can run."""
    schedule, pp, ranks = str(plan.schedule), plan.layout.pp, plan.layout.data_degree
    share = batch // ranks
    sizes = [size for size in divisors(share) if not check_microbatches(schedule, pp, share // size)]
    counts = legal_microbatches(schedule, pp, plan.num_microbatches(batch))
    size, change = (plan.mb, "") if plan.mb else (1, " with --plan.mb 1")
    batches = f"--data.global_batch {listed(count * size * ranks for count in counts)}{change}"
    return f"--plan.mb {listed(sizes)}, or {batches}" if sizes else batches
