"""Build a run and its loader from a recipe: the one place where settings become arguments of the library."""

from __future__ import annotations

from typing import Literal

from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.config.recipe import Recipe
from shoal.data.loader import Loader, RankStream
from shoal.train.recipe.preflight import Job
from shoal.train.recipe.settings import settings_of
from shoal.train.run import Run


def build_run(recipe: Recipe, world: World, plan: Plan | None = None) -> Run:
    """Build the run of a recipe; `plan` replaces the recipe's own."""
    return Run(plan or recipe.plan, world=world, **settings_of(recipe))


def build_loader(job: Job, run: Run, *, workers: int | Literal["auto"]) -> Loader:
    """The loader of this rank's share of every global batch, from the current step."""
    recipe = job.recipe
    return Loader(
        RankStream(
            job.training,
            seed=recipe.run.seed,
            batch=recipe.data.global_batch,
            coordinate=run.coordinate,
            degree=run.degree,
        ),
        position=run.steps_done * recipe.data.global_batch,
        workers=workers,
        prefetch=recipe.data.prefetch,
        pin=run.device.type == "cuda",
        timeout=recipe.launch.timeout,
    )
