"""Everything about a run that can be wrong before a process is started, checked before a process is started."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shoal.blueprint.recipe import Recipe
from shoal.data.dataset import Dataset
from shoal.data.open import open_datasets
from shoal.errors import Problem, ShoalError, raise_if
from shoal.numerics.precision import precision_of
from shoal.observe.metrics import TRACKER_PACKAGES, require
from shoal.parallel.compose import refuse_unbuilt
from shoal.train.build import build_model, describe


@dataclass(frozen=True)
class Job:
    """A recipe whose plan is resolved for a number of ranks, and its data, opened."""

    recipe: Recipe
    training: Dataset
    held_out: Dataset


def check(recipe: Recipe, world_size: int) -> Job:
    """Find what is wrong with a recipe on this many ranks, without starting or writing anything."""
    plan = recipe.plan.resolve(world_size)
    refuse_unbuilt(plan)
    precision_of(plan.precision)
    plan.num_microbatches(recipe.data.batch)
    for tracker in recipe.run.trackers:
        require(TRACKER_PACKAGES[tracker], extra=tracker)
    training, held_out = open_datasets(recipe.data, recipe.run.seed)
    with torch.device("meta"):
        model = build_model(recipe.model)
    raise_if(_misfits(recipe, model, training), title=recipe.model.name)
    return Job(recipe.model_copy(update={"plan": plan}), training, held_out)


def _misfits(recipe: Recipe, model: nn.Module, data: Dataset) -> list[Problem]:
    """Where the model and the data do not fit together."""
    outputs = describe(model).num_outputs
    if outputs is None or data.vocabulary is None or data.vocabulary <= outputs:
        return []
    return [
        Problem(
            f"the data has {data.vocabulary} different labels, but the model can tell only {outputs} apart",
            f"--model.vocabulary (or --model.num_classes) {data.vocabulary}, or other data",
        )
    ]


def steps_of(job: Job) -> int | None:
    """The optimizer steps of the run; None when only the clock can tell."""
    if job.recipe.run.fast_dev_run:
        return FAST_DEV_STEPS
    steps = job.recipe.run.duration.steps(**units(job))
    if steps == 0:
        raise ShoalError(f"a run of {job.recipe.run.duration} makes no step", fix="--run.duration 100step")
    return steps


FAST_DEV_STEPS = 3


def units(job: Job) -> dict[str, int]:
    """What turns epochs and tokens into steps."""
    return {
        "batch": job.recipe.data.batch,
        "samples_per_epoch": len(job.training),
        "tokens_per_sample": job.training.tokens_per_sample,
    }
