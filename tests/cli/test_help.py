"""Help, version and schema: fast, complete, and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.cli import HELP, VERBS, main
from shoal.config.load import known_keys
from tests.speed import processor_seconds, slowness

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("shoal")  # the script that pip installs


@pytest.mark.alone
def test_help_is_fast() -> None:
    tries = [processor_seconds([COMMAND, "--help"]) for _ in range(3)]
    assert all(verb in tries[0][1].stdout for verb in VERBS)
    assert min(seconds for seconds, _ in tries) < 0.2 * slowness()


@pytest.mark.parametrize(
    "code",
    [
        "import shoal.blueprint",
        "from shoal.cli import main; main(['--help'])",
        "from shoal.cli import main; main(['schema'])",
        "from shoal.cli import main; main(['train', 'missing.yaml', '--optim.lrr', '1'])",
        "import shoal.cli.agent.coordinate, shoal.cli.train",  # a coordinator of several hosts computes nothing
    ],
)
def test_torch_stays_away(code: str) -> None:
    after = f"import sys; {code}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", after], check=True, capture_output=True)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_verbs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {verb}  " in out for verb in VERBS)
    assert HELP.splitlines()[0] in out


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out == f"shoal {shoal.__version__}\n"


def test_help_of_train_lists_every_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "--help-all"]) == 0
    out = capsys.readouterr().out.replace("_", "-")
    listed = [key for key in known_keys() if not key.startswith("plan.")]  # which are words of --plan
    assert [key for key in listed if f"--{key.replace('_', '-')} " not in out] == []
    assert all(option in out for option in ("--json", "--quiet", "--dry-run", "--nproc", "--device"))


@pytest.mark.parametrize("verb", ["train", "verify"])
def test_help_of_a_recipe_fits_two_screens_and_names_every_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([verb, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 80
    words = {word.strip(",.") for line in lines for word in line.split()}
    keys = [key.rpartition(".")[2] for key in known_keys() if key.count(".") == 1 and not key.startswith("plan.")]
    assert [key for key in keys if key not in words] == []
    assert {"--help-all", "--json", "--data.global_batch", "--plan"} <= words


def test_help_of_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--help"]) == 0
    assert "shoal schema > recipe.schema.json" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["schema"], ["schema", "--json"]])
def test_schema_is_the_one_in_docs(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    schema = json.loads(capsys.readouterr().out)
    stored = json.loads((ROOT / "docs" / "recipe.schema.json").read_text())
    assert schema == stored, "the recipe has changed: shoal schema > docs/recipe.schema.json"
    assert set(schema["properties"]) == {"model", "data", "optim", "plan", "launch", "checkpoint", "comm", "run"}
    assert schema["$defs"]["OptimSection"]["properties"]["lr"]["description"] == "Peak learning rate."
