"""The settings of a run: one name in recipe, `Run` and policy, and all wrong values reported at once."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from shoal import OuterOptimizer, Recipe, ShoalError
from shoal.parallel.policies import ComputePolicy, Policies, Settings, setting_names
from shoal.train.recipe.settings import OTHERWISE, settings_of
from shoal.train.run import Run


def test_type_checkers_know_every_setting() -> None:
    assert list(Settings.__annotations__) == setting_names()
    assert len(set(setting_names())) == len(setting_names())


def test_every_setting_is_a_key_of_a_recipe() -> None:
    assert set(settings_of(Recipe())) == set(setting_names()) - OTHERWISE


def test_a_recipe_decides_the_policies() -> None:
    recipe = Recipe.model_validate(
        {
            "optim": {"clip": 0.5, "param_dtype": "bf16", "loss_scale": 8.0},
            "comm": {"algorithm": "ring", "warmup_steps": 3, "outer_delay": 2, "outer_lr": 0.5},
            "run": {"seed": 7, "on_nan": "skip", "fp8": "rowwise", "loss": "fused", "bucket_mb": 4, "compile": True},
        }
    )
    policies = Policies.of(**settings_of(recipe))
    assert (policies.step.clip, policies.step.on_nan, policies.step.loss_scale) == (0.5, "skip", 8.0)
    expected = ComputePolicy(seed=7, param_dtype="bf16", compile=True, fused_loss=True, fp8="rowwise")
    assert policies.compute == expected
    assert (policies.sync.algorithm, policies.sync.warmup_steps, policies.sync.bucket_mb) == ("ring", 3, 4)
    assert policies.sync.outer == OuterOptimizer(lr=0.5, delay=2)


def test_all_wrong_values_at_once() -> None:
    with pytest.raises(ShoalError) as caught:
        Run(clip=-1.0, on_nan="go on", attention="fast", warmup_steps=-1, check_replicas=True)  # type: ignore[arg-type]
    named = [(problem.code, problem.what.split()[0]) for problem in caught.value.problems]
    numbers = [("R048", "clip"), ("R048", "check_replicas")]
    assert named == [("R047", "on_nan"), *numbers, ("R047", "attention"), ("R048", "warmup_steps")]


@pytest.mark.parametrize(
    ("wrong", "code", "fix"),
    [
        ({"seed": "x"}, "R048", "seed=0"),
        ({"seed": True}, "R048", "seed=0"),
        ({"deterministic": "maybe"}, "R047", "deterministic=True"),
        ({"sync_batch_norm": 1}, "R047", "sync_batch_norm=True"),
        ({"loss": 3}, "T018", "loss=lambda model, batch: ..."),
        ({"threads": 0}, "R048", "threads=1"),
        ({"threads": "two"}, "R048", "threads=1"),
        ({"timeout": -1}, "R048", "timeout=600.0"),
        ({"timeout": "x"}, "R048", "timeout=600.0"),
        ({"timeout": float("inf")}, "R048", "timeout=600.0"),
        ({"timeout": float("nan")}, "R048", "timeout=600.0"),
        ({"device": "gpu"}, "R049", "device='cuda'"),
        ({"device": "cuda:1"}, "R049", "device='cuda'"),
        ({"device": 0}, "R049", "device='auto'"),
        ({"clip": float("nan")}, "R048", "clip=1.0"),
        ({"on_nan": "skp"}, "R047", "on_nan='skip'"),
        ({"compile": "no_backend"}, "R047", "compile=True"),
        ({"outer": 3}, "R047", "outer=shoal.OuterOptimizer(lr=0.7, momentum=0.9)"),
        ({"outer": OuterOptimizer(lr=-1)}, "R048", "outer=shoal.OuterOptimizer(lr=0.7)"),
        ({"outer": OuterOptimizer(momentum=1.0)}, "R048", "outer=shoal.OuterOptimizer(momentum=0.9)"),
        ({"outer": OuterOptimizer(fragments=0)}, "R048", "outer=shoal.OuterOptimizer(fragments=1)"),
    ],
)
def test_a_wrong_value_has_a_fix_for_a_script(wrong: dict[str, Any], code: str, fix: str) -> None:
    with pytest.raises(ShoalError) as caught:
        Run("fp32", **wrong)
    assert caught.value.codes == (code,)
    assert f"fix: {fix}" in str(caught.value)
    with pytest.raises(ShoalError) as caught:  # beside another one
        Run("fp32 tp=2", **wrong)
    assert caught.value.codes == (code, "P009")


def test_a_policy_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Policies().compute.seed = 3  # type: ignore[misc]


def test_help_explains_every_setting() -> None:
    text = Run.__doc__ or ""
    assert [name for name in setting_names() if f"\n{name} " not in text] == []
