"""Check that the states of a model fit the memory of this machine, or of its GPUs with one rank each."""

from __future__ import annotations

import torch
from torch import nn

from shoal.config.checks.memory import Frozen, check_memory, host_memory
from shoal.config.recipe import Recipe
from shoal.errors import Problem
from shoal.numerics.optim.groups import moments_of
from shoal.parallel.lora.layers import adapted_layers
from shoal.train.build_model import describe
from shoal.train.recipe.preflight import ModelCheck


def check_fits(ranks: int) -> ModelCheck:
    """The check for `check_recipe`, with this many ranks on this machine."""

    def check(recipe: Recipe, model: nn.Module) -> list[Problem]:
        on_gpu = recipe.launch.device != "cpu" and torch.cuda.is_available() and recipe.plan.offload == "none"
        devices = range(min(ranks, torch.cuda.device_count()) if on_gpu else 0)
        memory = sum(torch.cuda.get_device_properties(n).total_memory for n in devices) if on_gpu else host_memory()
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        frozen = sum(each.numel() for each in model.parameters()) - trained
        lora = recipe.model.lora
        layers = adapted_layers(model).values() if lora is not None and lora.base is not None else ()
        packed = sum(layer.weight.numel() for layer in layers)
        in_files = recipe.plan.offload_folder is not None
        moments = 0 if in_files else moments_of(recipe.optim.name, model, describe(model).blocks)
        of_base = Frozen(frozen - packed, packed)
        return check_memory(recipe, recipe.plan, trained, frozen=of_base, ranks=ranks, memory=memory, moments=moments)

    return check
