"""Cases of a recipe's model: a small copy or the model itself, under the recipe's plan: `shoal verify`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.enumerate import legal_plans
from shoal.config.recipe import ModelSection, Recipe
from shoal.data.dataset import Dataset
from shoal.data.mixture import batch_ids
from shoal.data.order import sample_ids
from shoal.data.sources.open import open_datasets
from shoal.errors import Findings, Problem, raise_if
from shoal.parallel.data.shard_policy import ShardPolicy
from shoal.train.build_model import adapter_of, build_model, describe, without_memory
from shoal.train.model_prefix import function_for
from shoal.train.recipe.preflight import as_trained, check_sizes, check_task
from shoal.train.recipe.saving.start_weights import with_dimensions
from shoal.verification.api import (
    LR_OF_OTHERS,
    VERIFIED_SHARDING,
    check_built,
    num_tokens,
    reject_uncallable,
    with_blocks,
)
from shoal.verification.case import Case, in_precision, replaced_precision
from shoal.verification.compression_error import without_compression
from shoal.verification.options import TOLERANCES, RecipeSettings, check_verified_recipe
from shoal.verification.recipe.random_batches import draw, has_documents, random_batches, tokens_for

LR = 1e-2
"""The learning rate of shoal's own models."""


def case_of(recipe: Recipe, world_size: int, settings: RecipeSettings) -> Case:
    """The case of a recipe's model under its plan; of a small copy, if the model has one."""
    device = "cpu" if recipe.launch.device == "auto" else recipe.launch.device
    problems, section, datasets = check_case(recipe, world_size, settings)
    raise_if(problems, title=f"plan '{recipe.plan.fill(world_size).brief()}'")
    requested = recipe.plan.resolve(world_size)
    plan = in_precision(requested, settings.precision, device)
    batches = (
        random_batches(section, plan, recipe, settings.steps)
        if datasets is None
        else _real_batches(recipe, datasets[0], settings.steps)
    )
    exact = without_compression(plan)
    case = Case(
        build=_builder(section, datasets, plan),
        batches=batches,
        plan=exact,
        compressed=None if exact == plan else plan,
        seed=recipe.run.seed,
        lr=LR if function_for("RANDOM_BATCHES", section.name) is None else LR_OF_OTHERS,
        clip=recipe.optim.clip if recipe.optim.clip is None else min(recipe.optim.clip, 0.5),
        device=device,
        tolerance=TOLERANCES[plan.precision] if settings.tolerance is None else settings.tolerance,
        replaced=replaced_precision(requested, plan),
        shard=_sharding_of(recipe, is_small=datasets is None),
        not_verified=tuple(_not_verified(recipe, is_small=datasets is None)),
    )
    reject_uncallable(case)
    return case


def check_case(
    recipe: Recipe, world_size: int, settings: RecipeSettings
) -> tuple[list[Problem], ModelSection, tuple[Dataset, Dataset] | None]:
    """All problems that would end the verification of a recipe, before anything is started.

    Returns the model to verify, too, and the data of a model that has no small copy.
    """
    found = Findings()
    found += check_verified_recipe(recipe, world_size, settings)
    plan = recipe.plan.fill(world_size)
    recipe = found.of(with_dimensions, recipe) or recipe
    small = None if settings.real else found.of(smaller_model, recipe.model, plan.with_layout())
    section, is_small = small or (recipe.model, False)
    recipe = recipe if is_small else found.of(as_trained, recipe) or recipe
    datasets = None if is_small else found.of(open_datasets, recipe.data, recipe.run.seed)
    if is_small:
        drawn = found.of(draw, section, recipe, 2, tokens_for(plan.with_layout()), torch.Generator())
        tokens: int | None = None if drawn is None else num_tokens(drawn)
        found += found.of(_check_language_model, recipe) or ()
    else:
        tokens = None if datasets is None else datasets[0].tokens_per_sample
    if settings.real or small is not None:
        build = _builder(section, datasets, plan)
        found += found.of(check_built, build, plan, tokens) or ()
        model = None if datasets is None else found.of(without_memory, build)
        if model is not None and datasets is not None:
            found += [*check_task(model, datasets[0]), *check_sizes(model, datasets[0])]
    return found.problems, section, datasets


def _check_language_model(recipe: Recipe) -> list[Problem]:
    """Problems of the recipe's own model with any data, which a run rejects and a small copy would not show."""
    model = without_memory(lambda: build_model(recipe.model))
    adapter = None if model is None else adapter_of(model)
    if adapter is None or getattr(model, "recipe_task", None) != "next token":
        return []
    return list(adapter.check_language_model(model, has_documents=has_documents(recipe)))


def _builder(section: ModelSection, datasets: tuple[Dataset, Dataset] | None, plan: Plan) -> Callable[[], nn.Module]:
    """A function that builds the model of a recipe."""
    build = functools.partial(build_model, section)
    if datasets is None or (plan.pp or 1) == 1:
        return build
    two = datasets[0].batch(sample_ids(0, len(datasets[0]), 0, 2))
    return functools.partial(with_blocks, build, two, None, plan.pp)


def _sharding_of(recipe: Recipe, *, is_small: bool) -> ShardPolicy:
    """The units of a recipe. A small copy of its model has none of that size."""
    names = [name for name in VERIFIED_SHARDING if not (is_small and name == "wrap_min_params")]
    return ShardPolicy(**{name: getattr(recipe.comm, name) for name in names})


def _not_verified(recipe: Recipe, *, is_small: bool) -> Iterator[str]:
    """Settings for speed that the recipe changes and a verification ignores, which the user must know."""
    settings, defaults = recipe.model_dump(), Recipe().model_dump()
    for key in (
        "run.compile",
        "run.attention",
        "run.loss",
        "run.fused_layers",
        "run.recompute_swiglu",
        "run.sync_batch_norm",
        "optim.state_dtype",
        "comm.reduce_dtype",
        *(["comm.wrap_min_params"] if is_small else []),
    ):
        section, _, name = key.partition(".")
        if (value := settings[section][name]) != defaults[section][name]:
            yield f"{key} {str(value).lower()}"


def smaller_model(section: ModelSection, plan: Plan) -> tuple[ModelSection, bool]:
    """The model section of a small copy with the same structure, and whether there is one."""
    sizes = {"num_stages": plan.layout.pp * (plan.v or 1), "ep": plan.layout.ep}
    lora = section.lora and section.lora.model_copy(update={"adapter": None})  # whose matrices have other sizes
    by_prefix = function_for("SMALLER_BY_PREFIX", section.name)
    if by_prefix is not None:
        arguments = by_prefix(section.name, section.arguments, **sizes)
        return (
            (section, False) if arguments is None else (ModelSection(name=section.name, lora=lora, **arguments), True)
        )
    functions: dict[str, str] = importlib.import_module("shoal.models").SMALLER
    if section.name not in functions:
        return section, False
    module_name, _, function = functions[section.name].partition(":")
    shrink = getattr(importlib.import_module(module_name), function)
    return ModelSection(name=section.name, lora=lora, **shrink(section.arguments, **sizes)), True


def _real_batches(recipe: Recipe, dataset: Dataset, steps: int) -> list[Any]:
    size = recipe.data.global_batch
    every, seed = slice(0, size), recipe.run.seed
    return [dataset.batch(batch_ids(dataset, seed, step * size, size, every)) for step in range(steps)]


def legal_cases(recipe: Recipe, world_size: int, settings: RecipeSettings) -> Iterator[Case]:
    """A case for every valid layout of `world_size` ranks, from simple to composed."""
    with torch.device("meta"):
        model = build_model(recipe.model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for plan in legal_plans(world_size, description=describe(model), batch=recipe.data.global_batch, features=shapes):
        yield case_of(recipe.model_copy(update={"plan": plan}), world_size, settings)
