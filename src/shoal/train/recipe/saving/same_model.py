"""Whether the weights of a checkpoint mean the same in the model of a recipe, where the checkpoint has its own recipe.

Tensors of the same names and shapes compute something else with another base of rotary positions or another epsilon.
What is set under `model:` is meant to differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from torch import nn

from shoal.checkpoint.storage.manifest import Manifest
from shoal.config.recipe import ModelSection, Recipe
from shoal.errors import Problem
from shoal.train.model_prefix import function_for


def other_model(recipe: Recipe, model: nn.Module, manifest: Manifest, where: str) -> Iterator[Problem]:
    """Problems of the model of a checkpoint that the recipe's model starts with."""
    theirs = _section_in(manifest)
    if theirs is None:
        return
    ours = recipe.model
    if (problem := _other_kind(ours.name, theirs.name, where)) is not None:
        yield problem
        return
    by_prefix = function_for("OTHER_SECTIONS", ours.name)
    if by_prefix is not None:
        yield from by_prefix(model, {"name": theirs.name, **theirs.arguments}, where)
        return
    if ours.name != theirs.name:  # a user's own file, and another one
        return
    settings = None if ".py" in ours.name else function_for("SETTINGS", ours.name)
    here = dict(ours.arguments) if settings is None else settings(ours.arguments)
    there = dict(theirs.arguments) if settings is None else settings(theirs.arguments)
    for key in sorted(here.keys() | there.keys()):
        if here.get(key) != there.get(key) and key not in (ours.model_extra or {}):
            what = f"model.{key} must be {_shown(there.get(key))}, as in {where}, got {_shown(here.get(key))}"
            meant = f"; or, if ours is meant, --model.{key} {_shown(here[key])}" if key in here else ""
            yield Problem("C051", what, f"--model.{key} {_shown(there.get(key))}{meant}")


def _section_in(manifest: Manifest) -> ModelSection | None:
    """The model section of the run that saved it, or what an import has found; None: it says none."""
    recipe = manifest.state.get("recipe")
    found = recipe.get("model") if isinstance(recipe, Mapping) else manifest.state.get("model")
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return None
    return ModelSection.model_validate({key: value for key, value in found.items() if value is not None})


def _other_kind(ours: str, theirs: str, where: str) -> Problem | None:
    """Models of another kind; those of a user's own file may be any."""
    kinds = [name.partition(":")[0] if name.startswith("hf:") else name for name in (ours, theirs)]
    if kinds[0] == kinds[1] or any(".py" in name for name in kinds):
        return None
    fix = f"--model.name {theirs}"
    if kinds[1] == "hf":
        fix += f"; or shoal checkpoint export {where} FOLDER --format huggingface, and --run.start_from FOLDER"
    return Problem("M087", f"the weights must be of the model {ours!r}, got {theirs!r} in {where}", fix)


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:80]
