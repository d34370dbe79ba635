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
    raise_if(_misfits(recipe, _built_without_memory(recipe), training), title=recipe.model.name)
    job = Job(recipe.model_copy(update={"plan": plan}), training, held_out)
    raise_if(_odd_clocks(job), title="the settings")
    steps_of(job)
    return job


def _built_without_memory(recipe: Recipe) -> nn.Module | None:
    """The model with shapes and without values, or None where a user's function cannot build it so.

    Code that looks at values while it builds (`torch.linspace(...).tolist()`) is right, and fails on the meta device.
    If it is wrong, the first rank to run it says so.
    """
    try:
        with torch.device("meta"):
            return build_model(recipe.model)
    except ShoalError:
        raise
    except Exception:
        return None


def _misfits(recipe: Recipe, model: nn.Module | None, data: Dataset) -> list[Problem]:
    """Where the model and the data do not fit together."""
    outputs = describe(model).num_outputs if model is not None else None
    if outputs is None or data.vocabulary is None or data.vocabulary <= outputs:
        return []
    return [
        Problem(
            f"the data has {data.vocabulary} different labels, but the model can tell only {outputs} apart",
            f"--model.vocabulary (or --model.num_classes) {data.vocabulary}, or other data",
        )
    ]


def _odd_clocks(job: Job) -> list[Problem]:
    """Lengths in seconds beside lengths in steps: neither can be turned into the other before the run."""
    optim, run = job.recipe.optim, job.recipe.run
    problems = []
    if run.evaluate_every.seconds is not None:
        what = f"run.evaluate_every {run.evaluate_every} is a length of time, and evaluations are counted in steps"
        problems.append(Problem(what, "--run.evaluate_every 100step"))
    if optim.warmup.seconds and run.duration.seconds is None and not run.fast_dev_run:
        what = f"optim.warmup {optim.warmup} is a length of time, and a run of {run.duration} is not"
        problems.append(Problem(what, "--optim.warmup 20step, or a --run.duration in min"))
    return problems


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
