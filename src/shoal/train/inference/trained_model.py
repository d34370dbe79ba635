"""The whole model of a run in one process, with the weights of one of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.checkpoint.full_tensor import FullTensors
from shoal.checkpoint.state.base_fingerprint import BASE, compare, fingerprint_of_whole
from shoal.checkpoint.storage.locate import SavedStep, find
from shoal.config.load import load_recipe
from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.numerics.init import has_init_rule, init_missing, initialise
from shoal.numerics.precision import precision_of
from shoal.parallel.lora.layers import is_adapter
from shoal.train.build_model import build_model
from shoal.train.recipe.saving.start_weights import foreign_tensors, is_foreign, source_of


@dataclass(frozen=True)
class TrainedModel:
    """A model with the weights of a step, on the CPU in float32, and the recipe that trained it."""

    model: nn.Module
    recipe: Recipe
    step: SavedStep


@torch.no_grad()
def trained_model(directory: Path, step: int | None = None) -> TrainedModel:
    """Build the model of a run's recipe and fill it from a step; None: the newest."""
    saved = find(directory, step)
    recipe = recipe_of(saved)
    torch.manual_seed(recipe.run.seed)
    model = build_model(recipe.model)
    if BASE in saved.manifest.state:
        _fill_base(model, recipe)
        compare(saved.manifest, fingerprint_of_whole(model), str(saved.path))
    init_missing(model, recipe.run.seed)
    with FullTensors(saved) as full:
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        expects = trained.__contains__ if BASE in saved.manifest.state else None
        _fill(model, full.model(), str(saved.path), expects=expects)
    return TrainedModel(model.eval(), recipe, saved)


def recipe_of(saved: SavedStep) -> Recipe:
    """Return the recipe of a checkpoint: that in its manifest, else the file in its run directory."""
    known = saved.manifest.state.get("recipe")
    if isinstance(known, dict):
        return Recipe.model_validate(known)
    beside = saved.path.parent.parent / "recipe.yaml"
    if beside.is_file():
        return load_recipe(beside)
    raise ShoalError(
        f"{saved.path} must hold the recipe of its run, got none",
        fix="the directory of a run of shoal train",
        code="L020",
    )


def _fill_base(model: nn.Module, recipe: Recipe) -> None:
    """The frozen weights as the run had them: from `run.start_from`, or from the seed; rounded as they were there."""
    if has_init_rule(model):
        initialise(model, recipe.run.seed)
    where = source_of(recipe)
    if where is not None and is_foreign(where):
        plain = build_model(recipe.model.model_copy(update={"lora": None}))
        _fill(model, foreign_tensors(plain, where), where, expects=lambda name: not is_adapter(name))
    elif where is not None:
        start = find(Path(where))
        with FullTensors(start) as full:
            _fill(model, full.model(), str(start.path), expects=lambda name: not is_adapter(name))
    frozen = precision_of(recipe.plan.precision).frozen_dtype
    for parameter in model.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.copy_(parameter.to(frozen))


def _fill(model: nn.Module, tensors: Mapping[str, LazyTensor], where: str, expects: object) -> None:
    """Copy tensors into parameters and buffers of the same names. `expects`: which parameters must be there; None:
    all."""
    own = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    needed = [name for name, _ in model.named_parameters() if not callable(expects) or expects(name)]
    missing = next((name for name in needed if name not in tensors), None)
    strange = next((n for n, t in tensors.items() if n in own and tuple(own[n].shape) != t.shape), missing)
    if strange is not None:
        raise ShoalError(
            f"{where} is of another model than its recipe: {strange} is missing or has another shape",
            fix="the model as it was when the run was made",
            code="C011",
        )
    for name, tensor in tensors.items():
        if name in own:
            for box in tensor.boxes:
                place = tuple(slice(begin, begin + size) for begin, size in zip(box.begin, box.shape, strict=True))
                own[name][place].copy_(box.read()) if place else own[name].copy_(box.read())
