"""`--deepspeed ds_config.json`: the settings of a config, below those of the command line and above the recipe's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path

from shoal.comm.rendezvous.launcher_environment import read_environment
from shoal.config.checks.memory import has_no_accelerator
from shoal.config.deepspeed.translate import translate
from shoal.config.deepspeed.translation import Translation
from shoal.config.load import read_recipe
from shoal.config.recipe import Recipe
from shoal.config.recipe_file import read_yaml
from shoal.errors import ShoalError

Overrides = list[tuple[str, str]]

LOSS = (
    "loss: the mean over all labels of the global batch; DeepSpeed averages the means of microbatches and ranks"
    " (--optim.loss_mean microbatch)"
)


def translated_for_recipe(
    path: Path, recipe: Path | None, overrides: Overrides, *, several_hosts: bool, ranks: int | None = None
) -> Translation:
    """Translate the config for a recipe and the settings of a command. `ranks` None: those of this machine.

    They may set degrees that the config does not have, and the global batch depends on all of them. So the config is
    translated twice: for the plan, and for the batch.
    """
    if ranks is None and not several_hosts:
        ranks = _num_ranks(recipe, dict(overrides))
    plan = translate(path, target="train", num_ranks=ranks)
    shared = _num_sharing(read_recipe(recipe, [*plan.overrides(), *overrides]).recipe)
    return translate(path, target="train", num_ranks=None if shared is None else ranks, shared=shared)


def _num_sharing(recipe: Recipe) -> int | None:
    """The number of ranks that see the same samples; None: the planner will choose it."""
    degrees = (recipe.plan.tp, recipe.plan.pp, recipe.plan.cp)
    return None if recipe.run.planned and None in degrees else prod(degree or 1 for degree in degrees)


def _num_ranks(recipe: Path | None, overrides: Mapping[str, str]) -> int | None:
    """The number of ranks, as far as it is known without torch."""
    if (typed := overrides.get("launch.nproc", "")).isdecimal():
        return int(typed)
    if (placement := read_environment(os.environ)) is not None:
        return placement.world_size
    try:
        launch = (read_yaml(recipe) if recipe is not None else {}).get("launch") or {}
        nproc = launch.get("nproc") if isinstance(launch, dict) else None
    except ShoalError:  # which the recipe's own reading reports
        nproc = None
    if isinstance(nproc, int):
        return nproc
    is_cpu = overrides.get("launch.device") == "cpu" or has_no_accelerator()
    return 1 if is_cpu else None
