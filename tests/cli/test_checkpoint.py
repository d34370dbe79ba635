"""`shoal checkpoint`: what it prints, its exit codes, and the page that documents it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.checkpoint.storage.manifest import with_checksum
from shoal.cli import main
from shoal.config.load import dump_recipe
from shoal.config.recipe import Recipe
from shoal.models import llama
from shoal.numerics.init import initialise

PAGE = Path(__file__).parents[2] / "docs" / "interchange.md"
LLAMA: dict[str, Any] = {
    "num_layers": 1, "hidden": 16, "num_heads": 4, "num_kv_heads": 2, "vocabulary": 37, "ffn": 24, "max_sequence": 64,
}  # fmt: skip


def save(folder: Path, *, seed: int = 0, steps: int = 2) -> None:
    """Train a small model, and save it after each step."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    initialise_plainly(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with shoal.Run("mb=2", seed=seed) as run:
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for _ in range(steps):
            run.step((torch.randn(8, 4, generator=generator), torch.randint(0, 3, (8,), generator=generator)))
            run.save(folder)


def initialise_plainly(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two steps; nobody writes to it."""
    root = tmp_path_factory.mktemp("made")
    save(root / "runs" / "tiny" / "checkpoints")
    save(root / "runs" / "other" / "checkpoints", seed=1, steps=1)
    return root


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the working directory."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


TINY = Path("runs/tiny/checkpoints")
SHARD = Path("shard-00000.safetensors")


def say(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """What a command says as JSON: that, and nothing else."""
    capsys.readouterr()
    assert main(["checkpoint", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What a command tells a person."""
    capsys.readouterr()
    assert main(["checkpoint", *words]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out + err


# ---- ls -------------------------------------------------------------------------------------------------------------


def test_ls_lists_what_is_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in ("runs/tiny", str(TINY)):
        found = say(capsys, "ls", place)["checkpoints"]
        assert [one["step"] for one in found] == [1, 2]
        assert [one["is_latest"] for one in found] == [False, True]
        assert [one["problem"] for one in found] == [None, None]
        assert found[0]["parameters"] == 4 * 8 + 8 + 8 * 3 + 3
        assert found[0]["tensors"] == 12
        assert found[0]["plan"] == "zero=0 mb=2"
        assert found[0]["bytes"] == (TINY / "step-00000001" / SHARD).stat().st_size
    out = told(capsys, "ls", "runs/tiny")
    assert "latest" in out
    assert "zero=0 mb=2" in out
    [one] = say(capsys, "ls", str(TINY / "step-00000001"), "--tensors")["checkpoints"]
    assert {"name": "model/0.weight", "dtype": "F32", "shape": [8, 4], "shards": 1} in one["tensor_list"]
    assert "optimizer/exp_avg_sq/2.bias" in told(capsys, "ls", str(TINY), "--tensors")


def test_ls_names_what_is_not_whole(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(TINY / "step-00000001", TINY / "step-00000003")
    (TINY / "step-00000003" / SHARD).write_bytes(b"short")
    shutil.copytree(TINY / "step-00000001", TINY / "step-00000004")
    (TINY / "step-00000004" / "manifest.json").write_text("{}")
    (TINY / "step-00000005").mkdir()
    (TINY / ".draft-step-00000006").mkdir()
    shutil.copytree(TINY / "step-00000001", TINY / "aside-step-00000007")
    found = {Path(one["path"]).name: one["problem"] for one in say(capsys, "ls", "runs/tiny")["checkpoints"]}
    assert found["step-00000003"].startswith("damaged: shard-00000.safetensors has 5 bytes, and the manifest lists")
    assert found["step-00000004"].startswith("damaged: the manifest has no 'format'")
    assert found["step-00000005"] == "damaged: it has no manifest.json"
    assert found[".draft-step-00000006"].startswith("a draft")
    assert found["aside-step-00000007"] == "set aside"
    assert "a draft" in told(capsys, "ls", "runs/tiny")


@pytest.mark.parametrize("words", [["ls"], ["verify"], ["verify", "--all"]])
def test_torch_stays_away(here: Path, words: list[str]) -> None:
    action, *rest = words
    code = f"from shoal.cli import main; assert main(['checkpoint', {action!r}, 'runs/tiny', *{rest!r}]) == 0"
    after = f"import sys; {code}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", after], check=True, capture_output=True)


# ---- verify ---------------------------------------------------------------------------------------------------------


def test_what_is_whole_is_said_to_be(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = say(capsys, "verify", "runs/tiny", "--all")
    assert found["intact"]
    assert [one["bytes"] for one in found["checkpoints"]] == [
        (TINY / step / SHARD).stat().st_size for step in ("step-00000001", "step-00000002")
    ]
    assert told(capsys, "verify", "runs/tiny").startswith("intact   runs/tiny/checkpoints/step-00000002: all ")


@pytest.mark.parametrize("place", [0, 9, 200, -1])
def test_a_flipped_bit_is_found(here: Path, capsys: pytest.CaptureFixture[str], place: int) -> None:
    path = TINY / "step-00000001" / SHARD
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    found = say(capsys, "verify", "runs/tiny", "--all", code=1)
    assert [one["intact"] for one in found["checkpoints"]] == [False, True]
    damage = found["checkpoints"][0]["damages"][0]
    assert (damage["file"], damage["begin"], damage["end"]) == (str(SHARD), 0, len(data))
    assert "model/0.weight" in damage["tensors"]
    assert say(capsys, "verify", "runs/tiny")["intact"]  # the newest
    out = told(capsys, "verify", "runs/tiny", "--step", "1", code=1)
    assert re.search(
        r"shard-00000.safetensors bytes 0 to [\d,]+ differ from what was written, in .*model/0.weight", out
    )


def test_damage_in_a_large_file_is_told_with_its_bytes_and_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with shoal.Run("mb=2") as run:
        model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024))  # 8 MiB each: four chunks
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        run.save(tmp_path)
    [path] = tmp_path.glob("step-*/shard-00000.safetensors")
    data = bytearray(path.read_bytes())
    for place in (len(data) - 5000, 5 * 2**20, 5 * 2**20 + 4 * 2**20):
        data[place] ^= 128
    path.write_bytes(data)
    damages = say(capsys, "verify", str(tmp_path), code=1)["checkpoints"][0]["damages"]
    assert [(one["begin"], one["end"]) for one in damages] == [(2**22, 3 * 2**22), (4 * 2**22, len(data))]
    assert damages[0]["tensors"] == ["model/0.weight", "model/0.bias", "model/1.weight"]
    assert "model/1.bias" in damages[1]["tensors"]


def test_files_that_are_short_gone_swapped_or_of_another_step_are_found(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = TINY / "step-00000001", TINY / "step-00000002"

    def damages() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = say(capsys, "verify", str(second), code=1)["checkpoints"][0]["damages"]
        return found

    whole = (second / SHARD).read_bytes()
    (second / SHARD).write_bytes(whole[:-7])
    [damage] = damages()
    assert (damage["begin"], damage["end"]) == (len(whole) - 7, len(whole))
    assert len(damage["tensors"]) == 1
    (second / SHARD).unlink()
    [damage] = damages()
    assert damage["what"] == "cannot be read: No such file or directory"
    assert "model/2.weight" in damage["tensors"]
    (second / SHARD).write_bytes((first / SHARD).read_bytes())  # of the step before
    assert damages()[0]["what"] == "differ from what was written"
    (second / SHARD).write_bytes(whole)
    assert say(capsys, "verify", str(second))["intact"]
    (second / "notes.txt").write_text("nobody reads this")
    assert say(capsys, "verify", str(second))["checkpoints"][0]["unlisted_files"] == ["notes.txt"]
    manifest = json.loads((second / "manifest.json").read_text())
    manifest["tensors"]["model/0.weight"].update(shape=[4, 8])
    manifest["tensors"]["model/0.weight"]["pieces"][0].update(shape=[4, 8])
    (second / "manifest.json").write_text(json.dumps(manifest))
    [damage] = damages()
    assert damage["what"] == "the manifest does not match the hash at its end"
    (second / "manifest.json").write_bytes(with_checksum(json.dumps(manifest).encode()))  # somebody means it
    [damage] = damages()
    assert damage["what"] == "has F32 [8, 4], and the manifest lists F32 [4, 8]"
    (second / "manifest.json").write_text("[" * 1000)
    [damage] = damages()
    assert damage["file"] == "manifest.json"


# ---- diff -----------------------------------------------------------------------------------------------------------


def test_diff_tells_what_differs_and_how_much(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = str(TINY / "step-00000001"), str(TINY / "step-00000002")
    assert say(capsys, "diff", first, first) == {
        "equal": True, "equal_tensors": 12, "differences": [], "only_first": [], "only_second": [], "state": [],
    }  # fmt: skip
    found = say(capsys, "diff", first, second, code=1)
    assert not found["equal"]
    relative = [one["relative"] for one in found["differences"]]
    assert relative == sorted(relative, reverse=True)
    assert {"key": "step", "first": 1, "second": 2} in found["state"]
    assert len(say(capsys, "diff", first, second, "--weights", code=1)["differences"]) <= 4
    out = told(capsys, "diff", first, second, "--top", "2", code=1)
    assert "more: --top" in out
    assert "state step: 1 and 2" in out


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("ls nowhere", "the directory nowhere does not exist"),
        ("merge s3://bucket/run new", "got s3://bucket/run"),
        ("ls memory://nothing/here", "there is no checkpoint in memory://nothing/here"),
        ("export runs/tiny s3://bucket/run", "got s3://bucket/run"),
        ("ls runs", "there is no checkpoint in runs"),
        ("verify runs", "there is no checkpoint in runs"),
        ("verify runs/tiny --step 7", "saved steps are 1, 2"),
        ("verify runs/tiny --step 1 --all", "exclude each other"),
        ("verify runs/tiny/checkpoints/step-00000001 --step 2", "saved steps are 1"),
        ("ls runs/tiny/checkpoints/latest", "a checkpoint must be a directory, got the file"),
        ("diff runs/tiny nowhere", "the directory nowhere does not exist"),
        ("export runs/tiny runs", "exists; nothing was changed"),
        ("export runs/tiny runs --overwrite", "which no export has written; nothing was changed"),
        ("export runs/tiny new --format huggingface --optimizer", "weights alone"),
        ("export runs/tiny new --format huggingface --shard-size many", "got 'many'"),
        ("export runs/tiny new --step 9", "saved steps are 1, 2"),
        ("export runs/tiny runs/tiny/checkpoints/latest/new", "must be in a directory, got the file"),
        (
            "import runs/tiny/checkpoints/step-00000001/shard-00000.safetensors runs/tiny/checkpoints/latest/a",
            "must be in a directory, got the file",
        ),
        ("import runs/tiny new", "has checkpoints of shoal"),
        ("import nowhere new", "nowhere does not exist"),
        ("import runs/tiny new --format dcp", "must have .metadata for --format dcp"),
        ("import runs/tiny/checkpoints/step-00000001/shard-00000.safetensors runs/tiny", "nothing was changed"),
        ("import nowhere new --step -3", "must be 0 or more, got -3"),
        ("xport runs/tiny", "fix: shoal checkpoint export"),
    ],
)
def test_a_mistake_is_one_message(here: Path, capsys: pytest.CaptureFixture[str], words: str, what: str) -> None:
    before = sorted(str(path) for path in here.rglob("*"))
    assert what in told(capsys, *words.split(), code=2)
    said = say(capsys, *words.split(), code=2)
    assert said["exit_code"] == 2
    assert said["error"]["problems"][0]["fix"]
    assert sorted(str(path) for path in here.rglob("*")) == before


@pytest.mark.parametrize("action", ["ls", "verify", "diff", "export", "import"])
def test_every_action_has_help(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint"]) == 0
    assert f"  {action}" in capsys.readouterr().out
    assert main(["checkpoint", action, "--help"]) == 0
    assert f"shoal checkpoint {action}" in capsys.readouterr().out


# ---- out and in -----------------------------------------------------------------------------------------------------


def test_an_export_replaces_an_earlier_one_if_asked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = say(capsys, "export", "runs/tiny", "a.safetensors", "--step", "1")
    assert said == {
        "from": str(TINY / "step-00000001"), "step": 1, "to": "a.safetensors", "format": "safetensors", "tensors": 4,
        "bytes": 67 * 4, "config": False,
    }  # fmt: skip
    assert "exists; nothing was changed" in told(capsys, "export", "runs/tiny", "a.safetensors", code=2)
    assert "exported step 2 to a.safetensors" in told(capsys, "export", "runs/tiny", "a.safetensors", "--overwrite")
    said = say(capsys, "import", "a.safetensors", "ours")
    assert (said["tensors"], said["optimizer_states"], said["step"], said["skipped"]) == (4, 0, 0, [])
    assert say(capsys, "diff", "ours", "runs/tiny", "--weights")["equal"]
    assert "import of safetensors" in told(capsys, "ls", "ours")


def test_the_recipe_of_the_run_says_what_the_model_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama.build(**LLAMA)
    initialise(model, 0)
    with shoal.Run("mb=2") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
        run.save(tmp_path / "run" / "checkpoints")
    source, to = str(tmp_path / "run"), tmp_path / "hf"
    assert "fix: --recipe FILE" in told(capsys, "export", source, str(to), "--format", "huggingface")
    recipe = dump_recipe(Recipe.model_validate({"model": {"name": "llama", **LLAMA}}))
    (tmp_path / "recipe.yaml").write_text(recipe)
    again = ["export", source, str(to), "--format", "huggingface", "--overwrite"]
    assert say(capsys, *again, "--recipe", str(tmp_path / "recipe.yaml"))["config"]
    (tmp_path / "recipe.yaml").rename(tmp_path / "run" / "recipe.yaml")
    assert say(capsys, *again)["config"]
    config = json.loads((to / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"]) == ("llama", 16)
    section = say(capsys, "import", str(to), str(tmp_path / "back"))["model"]
    assert section["num_kv_heads"] == 2
    shutil.rmtree(to)
    assert say(capsys, "export", str(tmp_path / "back"), str(to), "--format", "huggingface")["config"]


def test_the_commands_of_the_page_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the order of the page; a diff of two runs answers no."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(commands) > 12
    for command in commands:
        assert command[0] == "shoal"
        wanted = 1 if command[2] == "diff" else 0
        assert main(command[1:]) == wanted, (command, capsys.readouterr().err)
    assert say(capsys, "diff", "runs/tiny", "imported/from-dcp")["equal"]
    assert say(capsys, "diff", "runs/tiny", "imported/from-file")["equal"]


def test_the_keys_of_the_page_are_those_that_are_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = PAGE.read_text().split("## As JSON")[1]
    said = {
        "ls": say(capsys, "ls", "runs/tiny", "--tensors"),
        "verify": say(capsys, "verify", "runs/tiny"),
        "diff": say(capsys, "diff", "runs/tiny", "runs/other", code=1),
        "export": say(capsys, "export", "runs/tiny", "a.safetensors"),
        "import": say(capsys, "import", "a.safetensors", "b"),
    }
    for action, found in said.items():
        [row] = re.findall(rf"^\| `{action}` \| (.*) \|$", table, re.MULTILINE)
        documented = set(re.findall(r"`(\w+)`", row))
        keys = set(found)
        for one in ("checkpoints", "differences"):
            keys |= set(found[one][0]) if found.get(one) else set()
        assert keys <= documented, keys - documented
        assert documented - keys <= {"file", "what", "begin", "end", "tensors"}, action
