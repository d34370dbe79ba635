"""Every shipped recipe is parsed and checked for its own number of ranks; those for the CPU are trained two steps."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.config.load import load_recipe
from shoal.config.recipe import Recipe
from tests.readme.fork_host import ROOT, Ran, run_commands

PATHS = sorted((ROOT / "recipes").glob("*.yaml"))
ON_CPU = [path for path in PATHS if load_recipe(path).launch.device == "cpu"]
# Less of everything that costs time and does not decide whether a recipe works.
SHORTER = ["--run.duration", "2step", "--data.validation", "0.0005", "--data.seq_len", "64", "--json"]


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.param
    return chosen


def test_it_fits_together(path: Path) -> None:
    from shoal.train.recipe.preflight import preflight, steps_of  # torch: two seconds, which parsing need not spend

    recipe = load_recipe(path)
    assert recipe.launch.nproc is not None, "a shipped recipe says how many ranks it is for"
    job = preflight(recipe, recipe.launch.nproc)
    assert job.recipe.plan.is_resolved
    assert (steps_of(job) or 0) > 0


def test_it_says_what_it_is_for(path: Path) -> None:
    first, *rest = path.read_text().splitlines()
    assert first.startswith("# ")
    assert "# yaml-language-server: $schema=../docs/recipe.schema.json" in rest
    assert load_recipe(path).run.name != Recipe().run.name


def run_all() -> tuple[dict[Path, Ran], set[Path]]:
    """What became of each recipe, and the summaries that were kept."""
    with tempfile.TemporaryDirectory() as folder:
        commands = [["train", str(path), *SHORTER, "--run.dir", str(Path(folder, path.stem))] for path in ON_CPU]
        ran = dict(zip(ON_CPU, run_commands(commands, timeout=280), strict=True))
        return ran, set(Path(folder).glob("*/summary.json"))


@pytest.mark.timeout(300)  # the first one waits for all recipes
@pytest.mark.parametrize("path", ON_CPU, ids=lambda path: path.stem)
def test_it_trains_on_a_cpu(path: Path, once: Callable[..., Any]) -> None:
    runs, summaries = once(run_all)
    ran = runs[path]
    assert ran.code == 0, ran.stderr
    summary = json.loads(ran.stdout)
    recipe = load_recipe(path)
    assert summary["steps"] == 2
    assert summary["ranks"] == recipe.launch.nproc
    assert 0.0 < summary["loss_first"] < 10.0
    assert summary["eval_loss"] is not None
    assert Path(summary["run_directory"]) / "summary.json" in summaries
