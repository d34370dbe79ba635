"""The settings of a run: one name in recipe, `Run` and policy, and all wrong values reported at once."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

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
    said = [problem.what for problem in caught.value.problems]
    expected = ["on_nan is 'go on'", "clip is -1.0", "check_replicas is True", "attention is 'fast'"]
    assert said == [*expected, "warmup_steps is -1"]


def test_a_policy_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        Policies().compute.seed = 3  # type: ignore[misc]


def test_help_explains_every_setting() -> None:
    text = Run.__doc__ or ""
    assert [name for name in setting_names() if f"\n{name} " not in text] == []
