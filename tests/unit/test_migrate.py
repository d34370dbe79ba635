"""The pages for users of other systems: their scripts, recipes and tables. `make test-peers` runs the other side."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from shoal.blueprint.plan import Plan
from shoal.blueprint.plan_parser import BARE_WORDS, KEYS
from shoal.config.load import load_recipe
from shoal.config.megatron.translate import translate_megatron
from shoal.config.recipe import Recipe

ROOT = Path(__file__).parents[2]
FOLDER, DOCS = ROOT / "examples" / "migrate", ROOT / "docs"
# By Accelerate 1.15.0 and by Fabric 2.6.6, on two ranks; `make test-peers` compares with what they print.
LOSSES = [0.75632, 0.67614, 0.62152, 0.67596, 0.58294, 0.58959, 0.58586, 0.58263, 0.52454, 0.54665, 0.56311, 0.53791]


@pytest.mark.parametrize("system", ["accelerate", "fabric"])
def test_a_page_shows_the_difference_of_its_scripts(system: str) -> None:
    before, after = ((FOLDER / f"{system}_{when}.py").read_text().splitlines() for when in ("before", "after"))
    [shown] = re.findall(r"^```diff\n(.*?)^```", (DOCS / f"{system}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown.splitlines() == list(difflib.unified_diff(before, after, lineterm="", n=1000))[3:]


@pytest.mark.parametrize("system", ["accelerate", "fabric"])
def test_a_script_has_the_losses_of_the_other_system(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile((FOLDER / f"{system}_after.py").read_text(), f"{system}_after.py", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert json.loads(printed.partition("losses ")[2]) == pytest.approx(LOSSES, abs=1e-5)
    assert (tmp_path / "saved" / "latest").exists()


@pytest.mark.parametrize(
    ("page", "language", "file"),
    [
        ("torchtitan", "toml", "torchtitan_before.toml"), ("torchtitan", "yaml", "torchtitan_after.yaml"),
        ("megatron", "sh", "megatron_before.sh"), ("megatron", "yaml", "megatron_after.yaml"),
    ],
)  # fmt: skip
def test_a_page_shows_its_files(page: str, language: str, file: str) -> None:
    assert f"```{language}\n{(FOLDER / file).read_text()}```" in (DOCS / f"{page}.md").read_text()


def rows() -> list[tuple[list[str], list[str]]]:
    """The settings of torchtitan and those of shoal, by row of the table."""
    table = (DOCS / "torchtitan.md").read_text().partition("<!-- keys -->")[2].partition("<!-- end -->")[0]
    cells = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`([^`]+)`", theirs), re.findall(r"`([^`]+)`", ours)) for theirs, ours in cells]


def keys_of(section: type[BaseModel], prefix: str = "") -> set[str]:
    found = set()
    for name, field in section.model_fields.items():
        kind = field.annotation
        inner = isinstance(kind, type) and issubclass(kind, BaseModel)
        found |= keys_of(kind, f"{prefix}{name}.") if inner else {prefix + name}  # type: ignore[arg-type]
    return found


KEYS_OF_RECIPES = keys_of(Recipe)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][0])
def test_what_a_row_names_is_there(row: tuple[list[str], list[str]]) -> None:
    theirs, ours = row
    assert theirs
    assert ours
    for word in ours:
        if word.endswith("="):
            assert word[:-1] in KEYS, word
        elif "." in word and "=" not in word and word != "config.json":
            assert word in KEYS_OF_RECIPES, word
        elif word not in ("never", "config.json", "hf:FOLDER"):
            assert word in BARE_WORDS or Plan.parse(word), word


def test_the_recipe_of_torchtitan_says_what_its_config_says() -> None:
    config = tomllib.loads((FOLDER / "torchtitan_before.toml").read_text())
    recipe = yaml.safe_load((FOLDER / "torchtitan_after.yaml").read_text())
    flat = {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
    sections = {name: keys for name, keys in recipe.items() if name != "plan"}
    ours = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    table = {key: shoal for theirs, shoal in rows() for key in theirs}
    assert flat.keys() - table.keys() == {"checkpoint.enable"}  # of which the page has a sentence
    numbers = {key: value for key, value in flat.items() if type(value) in (int, float) and "=" not in table[key][0]}
    assert len(numbers) == 15
    for key, value in numbers.items():
        said = ours[table[key][0]]
        assert value in said if isinstance(said, list) else said in (value, f"{value}step"), key
    plan = load_recipe(FOLDER / "torchtitan_after.yaml").plan
    assert (plan.tp, plan.zero, plan.mb, plan.recompute) == (2, 3, config["training"]["local_batch_size"], "selective")


def test_the_recipe_of_megatron_has_the_plan_of_its_arguments() -> None:
    arguments = (FOLDER / "megatron_before.sh").read_text().partition("pretrain_gpt.py")[2].replace("\\\n", " ")
    found = translate_megatron(arguments, num_ranks=16)
    assert not found.problems
    recipe = load_recipe(FOLDER / "megatron_after.yaml")
    theirs = {key: value for key, value in found.plan.items() if value != 1 or key in ("zero", "mb")}
    plan: Any = recipe.plan
    assert {key: getattr(plan, key) for key in theirs} == theirs
    assert (recipe.data.seq_len, recipe.data.global_batch) == (
        found.settings["seq_len"],
        found.settings["global_batch"],
    )
    flags = {words[0]: words[1:] for words in (part.split() for part in arguments.split("--")[1:])}
    optim = recipe.optim
    assert [optim.lr, optim.lr * optim.final_lr, optim.weight_decay, *optim.betas, optim.clip] == pytest.approx(
        [float(flags[key][0]) for key in ("lr", "min-lr", "weight-decay", "adam-beta1", "adam-beta2", "clip-grad")]
    )
    assert f"{flags['train-iters'][0]}step" == str(recipe.run.duration)
    assert f"{flags['save-interval'][0]}step" == str(recipe.checkpoint.every)


def test_the_index_lists_every_system() -> None:
    text = (DOCS / "migrate.md").read_text()
    pages = ["accelerate", "fabric", "deepspeed", "horovod", "ray", "torchtitan", "megatron"]
    assert re.findall(r"\]\((\w+)\.md\) \|$", text, re.MULTILINE) == pages
