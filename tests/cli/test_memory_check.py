"""A model that does not fit this machine is rejected before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shoal.cli import main
from shoal.config.checks import memory as memory_check
from shoal.config.load import load_recipe
from shoal.config.recipe import ModelSection, Recipe
from shoal.models.llama_config import PRESETS
from shoal.predict.presets.models import MODELS
from shoal.train.build_model import build_model, without_memory
from shoal.train.recipe.memory import fits
from tests.cli.host import Host

GIB = 2**30
HERE = memory_check.host_memory()
EIGHT = 16 * MODELS["llama3-8b"].parameters
no_gpu = pytest.mark.skipif(torch.cuda.is_available() or HERE > EIGHT, reason="this machine may hold 8 B parameters")


def recipe_of(*words: str) -> Recipe:
    pairs = [(words[n], words[n + 1]) for n in range(0, len(words), 2)]
    return load_recipe(None, pairs)


@no_gpu
def test_a_preset_that_cannot_fit_is_rejected_with_all_other_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model.preset", "llama3-8b", "--data.source", "gone", "--run.duration", "0step", "--json"]
    assert main(["train", *words]) == 2
    problems = json.loads(capsys.readouterr().out)["error"]["problems"]
    assert [problem["code"] for problem in problems] == ["R028", "D001", "Q012"]
    assert "8.03 B parameters take 119.7 GiB on 1 rank of" in problems[-1]["what"]
    assert "parameters 29.9, gradients 29.9, optimizer state 59.8" in problems[-1]["what"]
    assert "--overcommit" in problems[-1]["fix"]
    assert not list(tmp_path.iterdir())


@no_gpu
def test_any_model_that_cannot_fit_is_rejected_and_a_dry_run_says_so(host: Host, tmp_path: Path) -> None:
    words = ["--model.hidden", "8192", "--model.num_layers", "64", "--model.ffn", "32768", "--device", "cpu"]
    ended = host.run("train", *words, cwd=tmp_path)
    assert ended.code == 2
    assert "optimizer state " in ended.said
    ended = host.run("train", *words, "--dry-run", cwd=tmp_path)
    assert ended.code == 0
    assert "optimizer state " in ended.said


@pytest.mark.parametrize("name", [name for name in PRESETS if name in MODELS])
def test_presets_have_as_many_parameters_on_paper_as_in_a_run(name: str) -> None:
    model = without_memory(lambda: build_model(ModelSection.model_validate({"name": "llama", "preset": name})))
    assert model is not None
    assert sum(each.numel() for each in model.parameters()) == MODELS[name].parameters


@pytest.mark.parametrize(
    ("words", "ranks", "bytes_each"),
    [
        (("plan", "zero=0"), 4, 16 * 4),
        (("plan", "zero=3"), 4, 16),
        (("plan", "zero=3 dp_replicate=2"), 4, 32),
        (("plan", "tp=4"), 4, 16),
        (("plan", "zero=3"), 2, 8),  # half of the ranks are on this machine
        (("plan", "zero=3 bf16", "optim.state_dtype", "bf16"), 4, 12),
        (("plan", "zero=3 bf16", "optim.state_dtype", "bf16", "optim.param_dtype", "bf16"), 4, 8),
        (("plan", "zero=3", "optim.name", "sgd"), 4, 12),
        (("plan", "zero=3", "optim.name", "sgd", "optim.momentum", "0"), 4, 8),
        (("plan", "zero=3 fp64"), 4, 32),
    ],
)
def test_states_are_counted(words: tuple[str, ...], ranks: int, bytes_each: int) -> None:
    recipe = recipe_of(*words)
    assert sum(memory_check.bytes_of_states(recipe, recipe.plan.resolve(4), 1000, ranks=ranks)) == 1000 * bytes_each


@pytest.mark.parametrize(
    ("plan", "ranks", "bytes_of_parameters"),
    [
        ("zero=0", 1, 40 + 4000 + 3300),
        ("bf16", 1, 40 + 2000 + 3300),  # the base is held in the precision of the arithmetic
        ("fp64", 1, 80 + 8000 + 3300),
        ("zero=3 bf16", 4, 40 + 2000 + 4 * 3300),  # packed weights are whole on every rank
        ("tp=4 bf16", 4, 40 + 2000 + 3300),
    ],
)
def test_frozen_parameters_have_no_gradient_and_no_state(plan: str, ranks: int, bytes_of_parameters: int) -> None:
    recipe, frozen = recipe_of("plan", plan, "model.lora.rank", "2"), memory_check.Frozen(1000, 6400)
    found = memory_check.bytes_of_states(recipe, recipe.plan.resolve(ranks), 10, frozen=frozen, ranks=ranks)
    weight = 80 if "fp64" in plan else 40
    assert found == (bytes_of_parameters, weight, 2 * weight)


def test_packed_weights_of_a_recipe_are_counted_as_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[memory_check.Frozen] = []
    monkeypatch.setattr(fits, "check_memory", lambda *_, frozen, **__: known.append(frozen) or [])
    for base in ("null", "nf4"):
        recipe = recipe_of("model.preset", "tiny", "model.lora.rank", "2", "model.lora.base", base)
        fits.check_fits(1)(recipe, build_model(recipe.model))
    assert known[0].packed == 0
    assert known[1].packed > 0.5 * known[0].plain
    assert sum(known[1]) == sum(known[0])


def test_what_fits_to_the_byte_is_not_rejected() -> None:
    recipe = recipe_of("plan", "zero=0")
    plan = recipe.plan.resolve(4)
    assert memory_check.check_memory(recipe, plan, 1000, ranks=4, memory=64_000) == []
    assert memory_check.check_memory(recipe, plan, 1000, ranks=4, memory=0) == []  # unknown
    (problem,) = memory_check.check_memory(recipe, plan, 1000, ranks=4, memory=63_999)
    assert problem.fix.startswith("--plan.zero 3, or --optim.state_dtype bf16;")


def test_memory_is_that_of_this_machine() -> None:
    assert GIB < memory_check.host_memory() < 2**46


def test_overcommit_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--overcommit", "--dry-run", "--device", "cpu"]) == 0
    assert "optimizer state " not in capsys.readouterr().err
