"""A profile shows a prediction beside the part that it is of, and none beside parts that were not predicted."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.blueprint.plan import Plan
from shoal.config.load import load_recipe
from shoal.config.recipe import Recipe
from shoal.observe.profile.verdict import TITLES, Verdict, _beside
from shoal.parallel.policies import Policies
from shoal.predict.cluster_parser import parse_cluster
from shoal.train.profile import fixes
from shoal.train.profile.advice import Advice
from shoal.train.profile.fixes import to_change, to_type
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


# ---- what to type ----------------------------------------------------------------------------------------------------

AXES = ("tp", "cp", "ep", "pp", "dp_shard", "dp_replicate", "dp_cp", "edp", "cp_tp", "world", "other group")
VERDICTS = [
    *(Verdict(kind=kind, cost=0.5, evidence="", rank=0) for kind in TITLES if kind not in ("link", "bucket")),
    *(Verdict(kind="link", cost=0.5, evidence="", axis=axis) for axis in AXES),
    Verdict(kind="bucket", cost=0.5, evidence="", axis="dp_replicate"),
]
SETTINGS = {
    "run.compile": "true", "checkpoint.every": "1h", "run.bucket_mb": "auto", "data.workers": "8",
    "data.global_batch": "16", "launch.device": "cpu",
}  # fmt: skip


def recipe_of(plan: str, **changed: str) -> Recipe:
    """A recipe with other values than the defaults, and a resolved plan of four ranks."""
    overrides = {**SETTINGS, **{name.replace("__", "."): value for name, value in changed.items()}}
    recipe = load_recipe(TINY, overrides.items())
    return recipe.model_copy(update={"plan": Plan.parse(plan).resolve(4)})


def present(recipe: Recipe, flag: str) -> str:
    section, key = flag.removeprefix("--").split(".")
    value = getattr(getattr(recipe, section), key)
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=4 mb=1 recompute=selective",
        "tp=2 zero=1 mb=8",
        "pp=2 zero=1 recompute=full mb=4",
        "zero=3 cp=2 bf16",
        "compress=int8 mb=4",
    ],
)
def test_no_advice_is_what_the_run_has_already(plan: str) -> None:
    for recipe in (recipe_of(plan), recipe_of(plan, run__compile="false", checkpoint__every="auto")):
        for verdict in VERDICTS:
            for said in (Advice(recipe, 4, workers=8).fix(verdict), to_type(verdict, recipe, workers=8)):
                flags = re.findall(r"(--\w+\.\w+) (\w+)", said)
                for flag, value in flags:
                    assert value != present(recipe, flag), f"{verdict.kind} {verdict.axis}: {said}"
                assert said


def test_advice_begins_with_the_settings_of_the_run() -> None:
    def said(kind: str, recipe: Recipe, axis: str = "") -> str:
        return to_type(Verdict(kind=kind, cost=0.5, evidence="", axis=axis), recipe, workers=8)

    plain = recipe_of("dp_replicate=4 mb=1 recompute=selective")
    assert said("data", plain).startswith("--data.workers 16,")
    assert said("bubble", plain) == "a larger --data.global_batch: more microbatches"
    assert said("bubble", recipe_of("pp=2 mb=4")) == "--plan.mb 2: more microbatches"
    assert said("recompute", plain) == "--plan.recompute none, if memory allows"
    assert said("saving", plain) == "--checkpoint.every 2h or --checkpoint.dir on a faster disk"
    assert said("saving", recipe_of("ddp", checkpoint__every="auto")).startswith("--checkpoint.mtbf 48h or ")
    assert said("saving", recipe_of("ddp", checkpoint__every="0step", checkpoint__memory_every="1step")) == (
        "--checkpoint.memory_every 2step or --checkpoint.dir on a faster disk"
    )
    assert said("idle", plain) == "--plan.mb 2: fewer and larger kernels"
    assert said("idle", recipe_of("dp_replicate=4")) == "a larger --data.global_batch: fewer and larger kernels"
    assert "compile" not in said("compute", plain)
    assert said("bucket", plain) == "--run.bucket_mb 25"
    assert said("bucket", recipe_of("ddp", run__bucket_mb="0.1")) == "--run.bucket_mb auto in place of 0.1"
    assert said("link", recipe_of("tp=2 zero=3"), "tp") == "shoal bench comm, and --plan.tp 1, if memory allows"
    assert "--plan.zero 1:" in said("link", recipe_of("tp=2 zero=3"), "dp_shard")
    assert "--plan.compress int8:" in said("link", plain, "dp_replicate")


@pytest.mark.parametrize("axis", ["world", "other group"])
def test_what_all_ranks_exchange_is_no_reason_for_another_plan(axis: str) -> None:
    """Losses, counts and norms are no communication of `dp`, whose plans the planner has priced."""
    verdict = Verdict(kind="link", cost=0.5, evidence="", axis=axis)
    said = Advice(recipe_of("zero=3"), 4).fix(verdict)
    assert said == "shoal bench comm, and a larger --data.global_batch: fewer bytes for each sample"


def test_the_cores_of_a_host_are_for_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixes, "num_cores", lambda: 2)
    verdict = Verdict(kind="cores", cost=0.5, evidence="")
    assert Advice(recipe_of("ddp"), 2).fix(verdict).startswith("top,")
    assert Advice(recipe_of("ddp"), 4).fix(verdict).startswith("--nproc 2:")
    assert Advice(recipe_of("ddp", launch__threads="2"), 2).fix(verdict) == "--launch.threads 1 in place of 2"


def test_advice_for_a_script_begins_with_its_settings() -> None:
    def said(kind: str, plan: str, axis: str = "", **settings: Any) -> str:
        verdict = Verdict(kind=kind, cost=0.5, evidence="", axis=axis)
        return to_change(verdict, Plan.parse(plan).resolve(4), Policies.of(**settings))

    assert said("compute", "ddp") == 'Run("bf16"), compile=True or more ranks'
    assert said("compute", "bf16", compile=True) == "more ranks"
    assert said("recompute", "recompute=selective") == "recompute=none, if memory allows"
    assert said("bubble", "pp=2 mb=1") == "a larger batch, so that there are more microbatches"
    assert said("bucket", "ddp", bucket_mb="auto") == "Run(bucket_mb=25)"
    assert said("bucket", "ddp", bucket_mb=0.5) == 'Run(bucket_mb="auto") in place of 0.5'
    assert "compress" not in said("link", "tp=2 zero=3", "tp")
    assert "zero=1" in said("link", "zero=3", "dp_shard")
    for verdict in VERDICTS:
        assert to_change(verdict, Plan.parse("zero=3").resolve(4), Policies.of())
