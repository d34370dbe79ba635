"""A run and its batches as a recipe tells them: the one place where settings become arguments of the library."""

from __future__ import annotations

from typing import Literal

from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.config.recipe import Recipe
from shoal.data.loader import Loader, RankStream
from shoal.train.recipe.preflight import Job, fused_loss_of, outer_of
from shoal.train.run import Run


def build_run(recipe: Recipe, world: World, plan: Plan | None = None) -> Run:
    """What the recipe says, as the library takes it; under another plan, if one is given."""
    optim, settings = recipe.optim, recipe.run
    return Run(
        plan or recipe.plan,
        seed=settings.seed,
        clip=optim.clip,
        on_nan=settings.on_nan,
        deterministic=settings.deterministic,
        loss_scale=optim.loss_scale,
        loss_scale_window=optim.loss_scale_window,
        bucket_mb=settings.bucket_mb,
        find_unused_parameters=settings.find_unused_parameters,
        sync_batch_norm=settings.sync_batch_norm,
        compile=settings.compile,
        attention=settings.attention,
        fused_loss=fused_loss_of(recipe),
        fp8=settings.fp8,
        fp8_min_features=settings.fp8_min_features,
        fp8_head=settings.fp8_head,
        weights=optim.param_dtype,
        recompute_swiglu=settings.recompute_swiglu,
        algorithm=recipe.comm.algorithm,
        warmup_steps=recipe.comm.warmup_steps,
        outer=outer_of(recipe),
        world=world,
    )


def build_loader(job: Job, run: Run, *, workers: int | Literal["auto"]) -> Loader:
    """This rank's share of every global batch, from where the run is."""
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
