"""The settings of a run, from a recipe. A setting has the same name in both, so a new one needs no line here."""

from __future__ import annotations

from typing import cast

from shoal.config.recipe import Recipe
from shoal.parallel.data.diloco import OuterOptimizer
from shoal.parallel.policies import Settings, setting_names

OTHERWISE = frozenset({"check_replicas", "check_compute"})
"""A duration in a recipe: the loop turns it into steps, when it knows the data."""


def settings_of(recipe: Recipe) -> Settings:
    """Every setting that a section of the recipe has, by its name, and the two that are made of several keys."""
    sections = (recipe.optim, recipe.comm, recipe.run)
    names = [name for name in setting_names() if name not in OTHERWISE]
    same = {
        name: getattr(section, name) for section in sections for name in names if name in type(section).model_fields
    }
    return cast(Settings, {**same, "fused_loss": fused_loss_of(recipe), "outer": outer_of(recipe)})


def fused_loss_of(recipe: Recipe) -> bool | None:
    """Whether the head is to compute the loss; None: where it can."""
    return {"auto": None, "fused": True, "plain": False}[recipe.run.loss]


def outer_of(recipe: Recipe) -> OuterOptimizer:
    """The optimizer of the shared weights under `sync=`."""
    comm = recipe.comm
    return OuterOptimizer(
        lr=comm.outer_lr,
        momentum=comm.outer_momentum,
        fragments=comm.fragments,
        delay=comm.outer_delay,
        rescale=comm.rescale,
    )
