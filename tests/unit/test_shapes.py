"""The shapes that the planner makes from dimensions are those of the built model, name by name and place by place."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from shoal.models import llama, moe
from shoal.parallel.inspect.trace_shapes import trace_shapes
from shoal.parallel.lora.apply import lora
from shoal.predict.exact.shapes import shapes_of
from shoal.predict.presets.models import MODELS
from shoal.predict.workload import Workload
from shoal.train.recipe.auto_plan import dimensions_of

SMALL: dict[str, Any] = {"vocabulary": 37, "hidden": 16, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "ffn": 24}
EXPERTS: dict[str, Any] = {**SMALL, "num_experts": 4, "top_k": 2, "expert_ffn": 8, "num_dense_layers": 1}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama.build, SMALL),
    "lora": (llama.build, SMALL),
    "tied": (llama.build, {**SMALL, "tied": True}),
    "moe": (moe.build, EXPERTS),
    "shared": (moe.build, {**EXPERTS, "num_shared_experts": 2, "tied": True}),
    "bias": (moe.build, {**EXPERTS, "score": "sigmoid", "bias_rate": 0.05, "auxiliary_coefficient": 0}),
    "capacity": (moe.build, {**EXPERTS, "capacity_factor": 0.8}),
    "choice": (moe.build, {**EXPERTS, "choice": "expert", "auxiliary_coefficient": 0.0}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_dimensions_give_the_shapes_of_the_built_model(kind: str) -> None:
    build, arguments = KINDS[kind]
    with torch.device("meta"):
        model = build(**arguments)
        model = lora(model, rank=2) if kind == "lora" else model
        tokens = torch.zeros(1, 12, dtype=torch.long)
    traced = trace_shapes(model, model.describe(), ((tokens,), {}))
    dimensions = dimensions_of(model)
    assert dimensions is not None
    made = shapes_of(Workload(name=kind, lora=2 * (kind == "lora"), **dimensions), 12)
    assert list(made.parameters.items()) == list(traced.parameters.items())
    for field in ("stream", "tp_boundaries", "attentions", "dispatches", "routers", "lookups", "frozen"):
        assert getattr(made, field) == getattr(traced, field), field
    said = made.description.splits
    assert {name: said[name] for name in traced.description.splits} == dict(traced.description.splits)
    unknown_here = {"splits": {}, "max_tokens": None, "documents": None, "positions_restart": False}
    unknown_here |= {"training_flops": None}
    assert replace(made.description, splits={}) == replace(traced.description, **unknown_here)


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.is_transformer])
def test_every_preset_has_as_many_parameters_as_its_shapes(name: str) -> None:
    model = MODELS[name]
    assert sum(prod(shape) for shape in shapes_of(model, 128).parameters.values()) == model.parameters
    if not (model.experts or model.latent):
        shapes = shapes_of(adapted := replace(model, lora=4), 128)
        assert sum(map(prod, shapes.trained(shapes.parameters).values())) == adapted.trained_parameters
