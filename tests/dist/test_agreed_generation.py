"""Agents of torchrun count their own restarts: a node that has joined after a failure counts fewer than the others.

With `run.overwrite` its ranks would start over in the directory in which the others resume.
"""

from __future__ import annotations

import pytest

from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.world import World
from shoal.train.recipe.invocation import RunInvocation
from tests.dist.pool import Pool


def agreed(world: World, has_new_store: bool) -> int:
    invocation = RunInvocation(start_time=0.0, generation=2 * world.rank)
    placement = Placement(
        rank=world.rank, world_size=world.size, local_rank=0, local_world_size=1, has_new_store=has_new_store
    )
    return invocation.agreed(placement, world).generation


@pytest.mark.parametrize(("has_new_store", "expected"), [(True, [2, 2]), (False, [0, 2])])
def test_ranks_of_agents_that_count_differently_are_in_one_generation(
    pool: Pool, has_new_store: bool, expected: list[int]
) -> None:
    assert pool.run(agreed, 2, has_new_store) == expected
