"""Settings of shards that are rejected, each with its code and values; and that no other setting reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal import Run, ShoalError
from shoal.blueprint.plan import Plan
from shoal.config.load import load_recipe
from shoal.models import llama
from shoal.parallel.checks import check_model
from shoal.parallel.policies import Policies
from shoal.train.build_model import describe
from shoal.train.recipe.auto_plan import unpredicted
from shoal.train.recipe.predict_step import predict_step, write_prediction

ROOT = Path(__file__).parents[2]


def model(**options: Any) -> nn.Module:
    with torch.device("meta"):
        return llama.build(num_layers=2, hidden=16, ffn=24, num_heads=4, vocabulary=37, **options)


def problems(plan: str, size: int, built: nn.Module | None = None, **settings: Any) -> list[tuple[str, str]]:
    built = built or model()
    found = check_model(built, Plan.parse(plan).resolve(size), describe(built), Policies.of(**settings))
    return [(problem.code, f"{problem.what} fix: {problem.fix}") for problem in found]


@pytest.mark.parametrize(
    ("plan", "settings", "code", "values"),
    [
        ("zero=3", {"wrap_classes": ("Blocky",)}, "M148", ["Llama", "'Blocky'", "fix: wrap_classes Block"]),
        ("zero=3", {"wrap_classes": ("ModuleList",)}, "M149", ["ModuleList", "model.layers", "no forward"]),
        ("zero=3", {"wrap_classes": ("Block", "FeedForward"), "compile": True}, "P073", ["model.layers.0.mlp"]),
        ("dp_replicate=2", {"wrap_min_params": 9}, "P074", ["wrap_min_params has", "fix: zero=3"]),
        ("dp_replicate=2", {"reduce_dtype": "bf16"}, "P074", ["reduce_dtype has", "compress=bf16"]),
        ("zero=2", {"backward_prefetch": 2}, "P074", ["backward_prefetch has", "zero=2"]),
        (
            "zero=3 pp=2",
            {"forward_prefetch": 2, "backward_prefetch": 1},
            "P074",
            ["and backward_prefetch have", "pp=2"],
        ),
        (
            "zero=3 recompute=full",
            {"wrap_classes": ("FeedForward",), "forward_prefetch": 2},
            "P075",
            ["recompute=full", "model.layers.0.mlp", "forward_prefetch=2"],
        ),
    ],
)
def test_what_is_rejected(plan: str, settings: dict[str, Any], code: str, values: list[str]) -> None:
    found = problems(plan, 4 if "pp=2" in plan else 2, **settings)
    assert [one for one, _ in found] == [code]
    assert [value for value in values if value not in found[0][1]] == []


def test_what_is_accepted() -> None:
    every = {"wrap_classes": ("Block",), "forward_prefetch": 2, "backward_prefetch": 2, "reduce_dtype": "bf16"}
    assert problems("zero=3", 2, **every) == []
    assert problems("zero=3", 2, compile=True, **every) == []
    assert problems("zero=3 recompute=full", 2, **every) == []
    assert problems("zero=0", 1, **every) == [], "a recipe for several ranks runs on one"
    assert problems("tp=2 zero=3", 2, **every) == [], "zero leaves one rank alone"


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight


def test_a_shared_parameter_is_in_the_unit_of_all_its_users() -> None:
    found = problems("zero=3", 2, Tied(), wrap_classes=("Linear",))
    assert [code for code, _ in found] == ["M149"]
    assert "first: first.weight is shared" in found[0][1]
    assert problems("zero=3", 2, nn.Sequential(Tied(), nn.Linear(4, 4)), wrap_classes=("Tied",)) == []


def test_weights_of_attention_are_read_without_a_call() -> None:
    attention = nn.Sequential(nn.MultiheadAttention(8, 2))
    found = problems("zero=3", 2, attention, wrap_classes=("NonDynamicallyQuantizableLinear",))
    assert [code for code, _ in found] == ["M149"]


@pytest.mark.parametrize(
    ("settings", "code", "fix"),
    [
        ({"wrap_classes": "Block"}, "R047", "wrap_classes=('Block',)"),
        ({"wrap_classes": nn.Linear}, "R047", "wrap_classes=('Linear',)"),
        ({"wrap_classes": [nn.Linear, "Block"]}, "R047", "wrap_classes=('Linear', 'Block')"),
        ({"wrap_min_params": 0}, "R048", "wrap_min_params=100000000"),
        ({"forward_prefetch": True}, "R048", "forward_prefetch=2"),
        ({"backward_prefetch": 0}, "R048", "backward_prefetch=2"),
        ({"reduce_dtype": "bfloat16"}, "R047", "reduce_dtype='bf16'"),
        ({"wrap_classes": ("Block",), "wrap_min_params": 9}, "R075", "wrap_min_params=None"),
        ({"limit_all_gathers": True}, "R046", "Run('zero=3'): FSDP2 frees memory"),
        ({"auto_wrap_policy": print}, "R046", "Run('zero=3', wrap_classes=('LlamaDecoderLayer',))"),
    ],
)
def test_a_wrong_value_has_a_fix(settings: dict[str, Any], code: str, fix: str) -> None:
    with pytest.raises(ShoalError) as caught:
        Run("fp32", **settings)
    assert caught.value.codes == (code,)
    assert f"fix: {fix}" in str(caught.value)


def test_a_prediction_says_that_it_does_not_know_them(tmp_path: Path) -> None:
    recipe = load_recipe(
        ROOT / "recipes" / "tiny.yaml", [("plan", "zero=3 mb=2"), ("comm.wrap_classes", "[FeedForward]")]
    )
    recipe = recipe.model_copy(update={"plan": recipe.plan.resolve(2)})
    figures = predict_step(recipe)
    assert figures["not_predicted"] == "with comm.wrap_classes"
    assert "memory" not in figures
    assert figures["flops"] > 0
    write_prediction(recipe, tmp_path, 2)
    assert not (tmp_path / "prediction.json").exists()
    assert unpredicted(recipe.model_copy(update={"plan": Plan.parse("zero=3").resolve(1)})) is None, "one rank"
