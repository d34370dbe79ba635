"""The steps of a case on all ranks of several hosts, as one message."""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch.distributed import Store

from shoal.bench.training.cases import checked_job
from shoal.bench.training.time_steps import RankSteps, time_steps
from shoal.bench.training.turns import joined
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.config.recipe import Recipe
from shoal.errors import raise_if
from shoal.train.recipe.preflight import Job

FLAG = "--bench-steps"
"""The first word of an order to an agent; it is no option of any command."""


def words_of(job: Job, num_steps: int) -> list[str]:
    """The order to make some steps of a job."""
    return [FLAG, json.dumps({"recipe": job.recipe.model_dump(mode="json"), "steps": num_steps})]


def read_words(words: Sequence[str], world_size: int, num_local: int) -> tuple[Job, int]:
    """The job of an order, checked on this host, and the number of its steps."""
    said = json.loads(words[1])
    problems, job = checked_job(Recipe.model_validate(said["recipe"]), world_size, num_local)
    raise_if(problems)
    assert job is not None
    return job, int(said["steps"])


def time_together(placement: Placement, store: Store, job: Job, num_steps: int) -> RankSteps:
    """Make the steps, and join those of all ranks. Every rank calls it."""
    return time_steps(placement, store, job, num_steps, join=joined)
