"""A recipe from YAML and the command line: merged, checked once, all problems at once, nearest names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.load import build_recipe, difference, dump_recipe, known_keys, load_recipe, read_recipe, unknown_key
from shoal.config.recipe import Recipe
from shoal.errors import Findings, ShoalError
from shoal.models import BUILDERS
from tests.rejects import rejects


def write(path: Path, text: str) -> Path:
    file = path / "recipe.yaml"
    file.write_text(text)
    return file


def test_defaults_are_a_recipe() -> None:
    recipe = load_recipe(None)
    assert recipe == Recipe()
    assert recipe.model.name == "llama"


def test_yaml_and_overrides_become_one(tmp_path: Path) -> None:
    file = write(tmp_path, "optim: {lr: 1e-3, schedule: linear}\nplan: dp_replicate=2 mb=4\nmodel: {preset: tiny}\n")
    recipe = load_recipe(
        file, [("optim.lr", "3e-4"), ("plan.mb", "8"), ("model.num-layers", "2"), ("run.duration", "2epoch")]
    )
    assert recipe.optim.lr == 3e-4
    assert recipe.optim.schedule == "linear"
    assert (recipe.plan.dp_replicate, recipe.plan.mb) == (2, 8)
    assert recipe.model.arguments == {"preset": "tiny", "num_layers": 2}
    assert str(recipe.run.duration) == "2epoch"


def test_another_model_on_the_command_line_does_not_get_the_keys_of_the_files(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {name: llama, preset: tiny, num_layers: 2}\n")
    assert load_recipe(path, [("model.name", "own.py:build")]).model.arguments == {}
    assert load_recipe(path, [("model.name", "mlp"), ("model.sizes", "[4, 2]")]).model.arguments == {"sizes": [4, 2]}
    assert load_recipe(path, [("model.name", "llama")]).model.arguments == {"preset": "tiny", "num_layers": 2}


def test_plan_as_words_replaces_plan_as_keys(tmp_path: Path) -> None:
    file = write(tmp_path, "plan: {dp_replicate: 2, mb: 4}\n")
    assert load_recipe(file, [("plan", "bf16 mb=1")]).plan == Recipe.model_validate({"plan": "bf16 mb=1"}).plan


def test_none_is_spelled_as_in_python_and_yaml() -> None:
    assert load_recipe(None, [("optim.clip", "None")]).optim.clip is None
    assert load_recipe(None, [("optim.clip", "null")]).optim.clip is None


def test_lists_are_yaml() -> None:
    assert load_recipe(None, [("optim.betas", "[0.8, 0.9]")]).optim.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("run.state_dtype", "optim.state_dtype"),
        ("run.lr", "optim.lr"),
        ("run.mb", "plan.mb"),
        ("optim.compile", "run.compile"),
        ("optim.fp8", "run.fp8"),
        ("data.seed", "run.seed"),
        ("run.dtype", "plan.precision"),
        ("run.gradient_checkpointing", "plan.recompute"),
        ("optim.fused", "optim.implementation"),
    ],
)
def test_a_key_of_another_section_is_found_by_its_own_name(key: str, meant: str) -> None:
    """Not by letters that the whole of it has in common with others: run.state_dtype was taken for run.trackers."""
    assert unknown_key(key).fix == f"--{meant} VALUE"


def test_all_problems_come_at_once_with_the_nearest_names(tmp_path: Path) -> None:
    file = write(tmp_path, "optim: {learning_rate: 1, weigth_decay: 0.1, lr: -1}\nplan: tp=0\ndta: {}\n")
    with pytest.raises(ShoalError) as caught:
        load_recipe(file, [("run.duration", "12 parsecs"), ("plam.mb", "4")])
    text = str(caught.value)
    assert "fix: --optim.lr 1\n" in text
    assert "fix: --optim.weight_decay 0.1\n" in text
    assert "optim.lr must be greater than 0, got -1" in text
    assert "got '12 parsecs'" in text
    assert "tp" in text
    assert "unknown key 'dta'" in text
    assert "unknown key 'plam'" in text
    assert len(caught.value.problems) == 7


@pytest.mark.parametrize("plan", ["{mb: 4}", "{precision: fp32}", "auto", ""])
def test_mistakes_in_several_keys_of_a_plan_are_each_reported_once(tmp_path: Path, plan: str) -> None:
    wrong = [("plan.precision", "bf8"), ("plan.recompute", "some"), ("plan.mb", "0")]
    with pytest.raises(ShoalError) as caught:
        load_recipe(write(tmp_path, f"plan: {plan}\n"), wrong)
    assert sorted(problem.what for problem in caught.value.problems) == [
        "plan: mb must be a whole number of at least 1, got 0",
        "plan: precision must be fp64, fp32, bf16, fp16 or fp8, got 'bf8'",
        "plan: recompute must be none, selective or full, got 'some'",
    ]


def test_mistakes_in_words_of_a_plan_and_in_keys_after_them_are_each_reported_once(tmp_path: Path) -> None:
    with pytest.raises(ShoalError) as caught:
        load_recipe(write(tmp_path, "plan: tp=0 zero=7\n"), [("plan.mb", "0"), ("plan.recompute", "some")])
    assert sorted(problem.what for problem in caught.value.problems) == [
        "plan: mb must be a whole number of at least 1, got 0",
        "plan: recompute must be none, selective or full, got 'some'",
        "plan: tp must be a whole number of at least 1, got 0",
        "plan: zero must be 0, 1, 2 or 3, got 7",
    ]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("max_grad_norm", "optim.clip"),
        ("gradient_accumulation_steps", "plan.mb"),
        ("tensor_parallel_degree", "plan.tp"),
    ],
)
def test_names_of_other_systems_are_understood(theirs: str, ours: str) -> None:
    with rejects("R011", match=ours):
        load_recipe(None, [(theirs, "1")])


def test_a_dumped_recipe_loads_to_itself() -> None:
    recipe = load_recipe(
        None, [("plan", "dp_replicate=2 bf16"), ("model.hidden", "64"), ("run.evaluate-every", "1epoch")]
    )
    assert build_recipe(yaml.safe_load(dump_recipe(recipe)), title="dump") == recipe


def test_no_such_recipe_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text("")
    with rejects("R006", "tiny.yaml"):
        load_recipe(tmp_path / "tinny.yaml")


@pytest.mark.parametrize(("text", "code"), [("a: [", "R021"), ("- a\n", "R010")])
def test_a_file_that_is_no_recipe_is_rejected(tmp_path: Path, text: str, code: str) -> None:
    with rejects(code, "yaml"):
        load_recipe(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("optim: {name: AdamWW}", "R012", "--optim.name adamw"),
        ("optim: {lr: true}", "R014", "optim.lr.*True"),
        ("optim: {lr: .inf}", "R013", "finite number"),
        ("optim: {betas: [1.0, 0.9]}", "R013", "less than 1"),
        ("run: {duration: 1e400step}", "R016", "1e400step"),
        ("run: {seed: 1, seed: 2}", "R021", "duplicate key 'seed'"),
        ("launch: {timeout: 1e14}", "R013", "less than or equal"),
        ("save_steps: 500", "R011", "--checkpoint.every 500step"),
        ("run: {num_train_epochs: 3}", "R011", "--run.duration 3epoch"),
        ("run: {epochs: 3}", "R011", "--run.duration 3epoch"),
        ("data: {per_device_batch_size: 4}", "R011", "--plan.mb 4"),
        (
            "run: {recompute_swiglu: perhaps}",
            "R012",
            "recompute_swiglu.*'perhaps'(.|\n)*fix: --run.recompute_swiglu true or false",
        ),
        ("run: {compile: inductor}", "R012", "fix: --run.compile true or false"),
        ("run: {fp8: blockwise}", "R012", "fix: --run.fp8 tensorwise or rowwise"),
        ("optim: {state_dtype: fp16}", "R012", "fix: --optim.state_dtype fp32 or bf16"),
        ("comm: {algorithm: rings}", "R012", "fix: --comm.algorithm ring$"),
        (
            "optim: {weight_decay: -1}",
            "R013",
            r"L2 penalty \(sgd, lars\), of every parameter with at least two dimensions\.$",
        ),
        ("checkpoint: {keep: 1}", "R013", "at least two, since one may be damaged"),
        ("plan: bf16 compile", "P001", "'compile'(.|\n)*fix: --run.compile true"),
        ("plan: {compile: true}", "P002", "'compile'(.|\n)*fix: --run.compile true"),
        ("plan: {weights: bf16}", "P002", "fix: --optim.param_dtype bf16"),
    ],
)
def test_an_invalid_value_is_rejected_with_a_fix(tmp_path: Path, text: str, code: str, message: str) -> None:
    with rejects(code, match=message):
        load_recipe(write(tmp_path, text))


def test_an_empty_section_and_a_model_by_name_are_fine(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "run:\nmodel: resnet\n"))
    assert (recipe.run, recipe.model.name) == (Recipe().run, "resnet")


def test_a_program_is_not_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("x = 1")
    with rejects("R008"):
        load_recipe(tmp_path / "model.py")


def test_every_key_is_documented() -> None:
    undocumented = [key for key, about in known_keys().items() if not about and not key.startswith("plan.")]
    assert undocumented == []


def test_the_key_of_the_model_names_all_that_there_are() -> None:
    assert all(f"`{name}`" in known_keys()["model.name"] for name in BUILDERS)


def test_difference_names_each_key() -> None:
    assert difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}}) == ["a.b: 1 → 3"]


junk = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=4) | st.just("tp=x mb=4")
trees = st.recursive(junk, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(junk, inner, max_size=2))
sections = st.sampled_from([*Recipe.model_fields, "planet"])
names = st.sampled_from(sorted({key.rpartition(".")[2] for key in known_keys()})) | junk


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(sections | junk, trees | st.dictionaries(names, trees, max_size=3), max_size=3))
def test_any_tree_is_read_as_far_as_possible(tree: dict[Any, Any]) -> None:
    """Values that cannot be read are problems, never another exception; the rest is a recipe."""
    found = Findings()
    recipe = found.of(build_recipe, tree, title="a tree")
    assert (recipe is None) == bool(found.problems)
    assert all(problem.what and problem.fix for problem in found.problems)


def test_a_list_of_a_wrong_length_is_one_problem_in_plain_words() -> None:
    for text in ("[]", "[0.9]", "[0.9, 0.9, 0.9]"):
        with rejects("R013", "optim.betas must be a list of 2 values", "--optim.betas '[0.9, 0.95]'") as caught:
            load_recipe(None, [("optim.betas", text)])
        assert len(caught.value.problems) == 1
    with rejects("R013", "run.seed must be a whole number, got 'x'"):
        load_recipe(None, [("run.seed", "x")])


def test_a_value_out_of_bounds_does_not_hide_other_problems() -> None:
    with rejects("R019") as caught:
        load_recipe(None, [("run.seed", "9" * 5000), ("optim.lr", "-1")])
    assert caught.value.codes == ("R019", "R013")


def test_settings_of_another_model_are_dropped_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {name: llama, hidden: 64, num_layers: 2}")
    reading = read_recipe(path, [("model.name", "mlp"), ("model.depth", "3")])
    assert reading.recipe.model.arguments == {"depth": 3}
    assert reading.notes == ("--model.name mlp drops the recipe's settings of llama: hidden 64, num_layers 2",)
    path.write_text("model: {hidden: 64, lora: {rank: 2, alpha: 32}}")
    recipe = read_recipe(path, [("model.name", "mlp"), ("model.lora.rank", "4")]).complete()
    assert recipe.model.lora is not None
    assert (recipe.model.lora.rank, recipe.model.lora.alpha) == (4, 32)
    path.write_text("model: {name: llama, hidden: 64, num_layers: 2}")
    assert read_recipe(path, [("model.name", "llama")]).notes == ()
