"""A profile shows a prediction beside the part that it is of, and none beside parts that were not predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.blueprint.plan import Plan
from shoal.config.load import load_recipe
from shoal.observe.profile.verdict import Verdict, _beside
from shoal.predict.cluster_parser import parse_cluster
from shoal.train.profile.advice import Advice
from shoal.train.recipe.auto_plan import is_calibrated

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


@pytest.mark.parametrize(
    ("plan", "axis"),
    [
        ("zero=3", "dp_shard"),
        ("zero=3 cp=2", "dp_shard_cp"),
        ("zero=0 cp=2", "dp_cp"),
        ("dp_replicate=4", "dp_replicate"),
        ("dp_replicate=2 dp_shard=2 zero=3", "dp_shard"),
    ],
)
def test_messages_of_gradients_are_predicted_on_their_axis(plan: str, axis: str) -> None:
    recipe = load_recipe(TINY)
    recipe = recipe.model_copy(update={"plan": Plan.parse(plan).resolve(4)})
    predicted = Advice(recipe, 4).predicted
    assert {name for name in predicted if name.startswith("dp")} == {f"{axis}.wire"}
    share = predicted[f"{axis}.wire"] / sum(predicted.values())
    link = Verdict(kind="link", cost=0.5, evidence="", axis=axis)
    assert _beside(link, predicted) == f"; predicted {share:.0%}"


def test_messages_between_hosts_are_predicted_for_their_link() -> None:
    recipe = load_recipe(TINY)
    recipe = recipe.model_copy(update={"plan": Plan.parse("dp_replicate=4").resolve(4)})
    on_one, on_two, uneven = (Advice(recipe, per_host).predicted["dp_replicate.wire"] for per_host in (4, 2, 3))
    assert on_two > on_one
    assert uneven > on_one


def test_a_prediction_between_hosts_is_calibrated_if_their_link_was_measured() -> None:
    one, two = (replace(parse_cluster(size), is_measured=True) for size in ("cpu:2", "cpu:2x2"))
    assert is_calibrated(one)
    assert not is_calibrated(two)
    assert is_calibrated(replace(two, between=replace(two.between, name="measured")))
    assert not is_calibrated(parse_cluster("cpu:2"))
    recipe = load_recipe(TINY, [("launch.device", "cpu")])
    recipe = recipe.model_copy(update={"plan": Plan.parse("ddp").resolve(2)})
    assert Advice(recipe, 2).is_calibrated is False


def test_nothing_is_said_of_a_part_that_was_not_predicted() -> None:
    predicted = {"forward": 1.0, "dp_shard.wire": 1.0}
    assert _beside(Verdict(kind="link", cost=0.5, evidence="", axis="world"), predicted) == ""
    assert _beside(Verdict(kind="recompute", cost=0.5, evidence=""), predicted) == ""
    assert _beside(Verdict(kind="link", cost=0.5, evidence="", axis="dp_shard"), {}) == ""
