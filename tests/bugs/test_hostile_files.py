"""Files and numbers that made shoal hang, run for ever, leave its directory or end in a traceback: each is one message.

Every command runs in a process of its own, and has a few seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal.train.recipe.loop  # noqa: F401  # what commands need, before they are timed
from shoal.checkpoint.storage import shard_file
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.manifest import Entry, Manifest, Piece, with_checksum
from shoal.checkpoint.storage.store import Store
from shoal.cli import main
from shoal.config.load import load_recipe
from shoal.errors import ShoalError
from shoal.files import opened, read_regular
from shoal.observe.run_directory import RunDirectory
from shoal.observe.run_lock import locked
from tests.cover import wide

SHARD = "shard-00000.safetensors"
SMALL = [
    *["--model.num_layers", "1", "--model.hidden", "16", "--model.ffn", "16", "--model.num_heads", "2"],
    *["--data.source", "synthetic", "--data.seq_len", "8", "--data.global_batch", "2", "--data.workers", "0"],
    *["--device", "cpu", "--launch.threads", "1", "--run.duration", "2step", "--run.dir", "run"],
]


def command(*words: str, cwd: Path, seconds: float = 8.0) -> tuple[int, str]:
    """The exit code of a command, and what it says on stderr. Fails if it takes longer, or shows a traceback."""
    said = cwd / ".said"
    process = multiprocessing.get_context("fork").Process(target=_act, args=(words, str(cwd), str(said)))
    began = time.monotonic()
    process.start()
    process.join(seconds)
    took = time.monotonic() - began
    process.kill()
    process.join()
    text = said.read_text()
    said.unlink()
    assert took < seconds, f"it takes more than {seconds} s: {text}"
    assert "Traceback" not in text
    assert process.exitcode is not None
    return process.exitcode, text


def _act(words: tuple[str, ...], cwd: str, said: str) -> None:
    os.chdir(cwd)
    os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY, 0o600), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os._exit(main(list(words)))


def fifo(path: Path) -> Path:
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def sock(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(path.parent)
        one.bind(path.name)


KINDS: dict[str, Callable[[Path], Any]] = {
    "FIFO": fifo,
    "socket": sock,
    "directory": lambda path: (path.unlink(missing_ok=True), path.mkdir()),
    "device": lambda path: (path.unlink(missing_ok=True), path.symlink_to("/dev/zero")),
}


def saved(root: Path, state: dict[str, Any] | None = None) -> Path:
    """A sound step; returns its folder."""
    store = Store(root, Filesystem())
    draft = store.begin(3)
    file = shard_file.write(draft / SHARD, {"model/weight": torch.ones(4)}, store.disk)
    entry = Entry("F32", (4,), (Piece(SHARD, "model/weight", (0,), (4,)),))
    return store.commit(Manifest(step=3, tensors={"model/weight": entry}, files={SHARD: file}, state=state or {}))


# ---- files that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_regular_file_is_opened(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    KINDS[kind](tmp_path / "it")
    KINDS[kind](tmp_path / "lock")
    acts = (lambda: opened(tmp_path / "it"), lambda: opened(tmp_path / "it", "wb"), lambda: locked(tmp_path))
    for act in acts:
        with pytest.raises(OSError, match="it must be a regular file"):
            act()


def test_what_is_written_is_not_written_behind_a_link(tmp_path: Path) -> None:
    """The lock of a run directory was opened to write: a link in its place emptied the file that it led to."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="it must be a regular file"):
        locked(tmp_path)
    (tmp_path / "draft").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="it must be a regular file"):
        Filesystem().create(tmp_path / "draft")
    assert (tmp_path / "mine").read_text() == "mine"
    assert read_regular(tmp_path / "lock", 10) == b"mine"  # what is read may be elsewhere, as in Hugging Face's cache


@pytest.mark.parametrize("name", ["a.txt", wide("a.jsonl"), "a.bin", wide("a.npy"), "folder/a.txt"])
@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_data_that_is_no_file(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    KINDS[kind](tmp_path / name)
    source = str((tmp_path / name).parent if "/" in name else tmp_path / name)
    code, said = command("train", "--dry-run", *SMALL, "--data.source", source, cwd=tmp_path)
    assert code == 2
    assert f"it must be a regular file, got a {kind}" in said


def test_an_image_that_is_no_file(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from shoal.data.sources.images import ImageFolder

    (tmp_path / "cat").mkdir()
    fifo(tmp_path / "cat" / "1.png")
    with pytest.raises(ShoalError, match="got a FIFO"):
        ImageFolder(tmp_path, 4).batch(torch.arange(1).numpy())


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("train", "it.yaml"), "it.yaml"),
        (("plan", "config.json", "--cluster", "h100:8"), "config.json"),
        (("plan", "llama3-8b", "--cluster", "it.yaml"), "it.yaml"),
        (("backtest", "it.csv"), "it.csv"),
        (("checkpoint", "import", "it.safetensors", "to"), "it.safetensors"),
    ],
)
def test_an_input_that_is_no_file(tmp_path: Path, words: tuple[str, ...], name: str) -> None:
    fifo(tmp_path / name)
    code, said = command(*words, cwd=tmp_path)
    assert code == 2
    assert "FIFO" in said


def test_a_recipe_through_a_pipe_of_the_shell_is_read(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"run: {name: piped}\n")
    os.close(write)
    assert load_recipe(Path(f"/dev/fd/{read}")).run.name == "piped"
    os.close(read)


@pytest.mark.parametrize("name", ["latest", "step-00000003/manifest.json", f"step-00000003/{SHARD}"])
@pytest.mark.parametrize("action", ["ls", "verify", wide("export")])
def test_a_checkpoint_with_a_fifo(tmp_path: Path, name: str, action: str) -> None:
    saved(tmp_path / "checkpoints")
    fifo(tmp_path / "checkpoints" / name)
    more = ["out.safetensors"] if action == "export" else []
    code, _ = command("checkpoint", action, "checkpoints", *more, cwd=tmp_path)
    assert code in ((0,) if name == "latest" or (action, name[-4:]) == ("ls", "sors") else (0, 1, 2))
    assert code == 0 or not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize("name", ["lock", *map(wide, ("recipe.yaml", "summary.json", "metrics.jsonl"))])
def test_a_run_directory_with_a_fifo(tmp_path: Path, name: str) -> None:
    assert command("train", *SMALL, "--quiet", cwd=tmp_path, seconds=30)[0] == 0
    fifo(tmp_path / "run" / name)
    code, said = command("train", *SMALL, "--quiet", "--resume", "latest", cwd=tmp_path, seconds=30)
    assert code in (0, 2, 3)
    assert code == 0 or "run" in said


# ---- names and modes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../..", "..", ".", "/etc", "a/b", "a\nb", "a\x1b[2J", "x" * 5000, " ", "a\0b", "\u202e"]
)
def test_the_name_of_a_run_stays_in_runs(tmp_path: Path, name: str) -> None:
    (tmp_path / "it.yaml").write_text(json.dumps({"run": {"name": name}}))
    with pytest.raises(ShoalError) as raised:
        load_recipe(tmp_path / "it.yaml")
    assert str(raised.value).replace("\n", " ").isprintable()
    assert len(str(raised.value)) < 1000


def test_a_new_run_directory_is_private_and_one_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    recipe = load_recipe(None, [("run.dir", str(tmp_path / "runs" / "new"))])
    RunDirectory.claim(recipe).close()
    assert stat.S_IMODE((tmp_path / "runs" / "new").stat().st_mode) == 0o700
    (tmp_path / "open").mkdir(mode=0o755)
    RunDirectory.claim(load_recipe(None, [("run.dir", str(tmp_path / "open"))])).close()
    assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o755


# ---- texts and numbers ----------------------------------------------------------------------------------------------

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
MERGED = "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12))
TEXTS = {
    "deep lists": "model: " + "[" * 20_000,
    "deep mappings": "model: " + "{a: " * 20_000,
    "deep, on one line": "model:\n  " + "- " * 20_000,
    "closed deep lists": "model: " + "[" * 20_000 + "]" * 20_000,
    "ten to the eleven aliases": LAUGHS,
    "the same, merged": MERGED,
    "an alias of itself": "model: &a [*a]",
    "5001 digits": "optim: {lr: " + "1" * 5001 + "}",
    "5001 digits of hex": "run: {seed: 0x" + "f" * 5001 + "}",
    "a date that is none": "run: {name: 2024-99-99}",
    "a mapping that is a text": "model: !!map x",
    "100,000 keys": "".join(f"k{n}: 1\n" for n in range(100_000)),
    "not UTF-8": "run: {name: \udcff}",
    "a NUL": 'data: {source: "a\\0b"}',
}


@pytest.mark.parametrize("what", TEXTS)
def test_a_hostile_recipe_is_one_message(tmp_path: Path, what: str) -> None:
    (tmp_path / "it.yaml").write_bytes(TEXTS[what].encode(errors="surrogateescape"))
    code, said = command("train", "it.yaml", "--dry-run", cwd=tmp_path)
    assert code == 2
    assert len(said) < 3000


@pytest.mark.parametrize("text", ["[" * 20_000, "1" * 5001, '{"a":' * 20_000, '{"hidden_size": ' + "1" * 5001 + "}"])
@pytest.mark.parametrize("words", [["plan", "config.json", "--cluster", "h100:8"], ["plan", "llama3-8b", "--cluster"]])
def test_a_hostile_config_is_one_message(tmp_path: Path, text: str, words: list[str]) -> None:
    name = "config.json" if "config.json" in words else "it.yaml"
    (tmp_path / name).write_text(text)
    code, said = command(*words, *([name] if words[-1] == "--cluster" else []), cwd=tmp_path)
    assert code == 2
    assert len(said) < 3000


def test_a_deep_line_of_jsonl_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "it.jsonl").write_text("[" * 200_000)
    code, said = command("train", "--dry-run", *SMALL, "--data.source", "it.jsonl", cwd=tmp_path)
    assert (code, "it.jsonl line 1" in said) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--dry-run", "--optim.lr", "1" * 5001],
        ["train", "--dry-run", "--run.seed", "0x" + "f" * 5001],
        ["train", "--dry-run", "--resume", "1" * 5001],
        ["train", "--dry-run", "--model.num_layers", "[" * 20_000],
        ["plan", "llama3-8b", "--cluster", "h100:" + "1" * 5001],
        ["checkpoint", "verify", ".", "--step", "1" * 5001],
    ],
)
def test_a_hostile_word_is_one_message(tmp_path: Path, words: list[str]) -> None:
    assert command(*words, cwd=tmp_path)[0] in (1, 2)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["plan", "llama3-8b", "--layers", "100000000", "--cluster", "h100:8"], "layers must be at most|got 100000000"),
        (["plan", "llama3-8b", "--cluster", "h100:8x100000000"], "nodes must be at most|got 100000000"),
        (
            ["plan", "llama3-8b", "--global-batch", "1000000000000", "--cluster", "h100:8"],
            "batch must be at most|got 1000000000000",
        ),
        (
            ["plan", "llama3-8b", "--seq-len", "1000000000000", "--cluster", "h100:8"],
            "seq-len must be at most|got 1000000000000",
        ),
        (["plan", "config.json", "--cluster", "h100:8"], "layers must be at most|got 100000000"),
        (["train", "--dry-run", "--model.num_layers", "100000000"], "num_layers must be at most|got 100000000"),
        (
            ["train", "--dry-run", "--model.num_layers", "100000000", "--plan", "auto"],
            "num_layers must be at most|got 100000000",
        ),
        (["train", "--dry-run", "--data.global_batch", "1000000000000"], "1000000000000"),
        (["train", "--dry-run", "--nproc", "100000000"], "100000000"),
        (["verify", "--model.num_layers", "100000000"], "num_layers must be at most|got 100000000"),
    ],
)
def test_an_absurd_number_is_named_at_once(tmp_path: Path, words: list[str], number: str) -> None:
    """These ran for ever; now they take a tenth of a second."""
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**8, "intermediate_size": 64}))
    code, said = command(*words, cwd=tmp_path)
    assert (code, all(part in said for part in number.split("|"))) == (2, True), said


# ---- a manifest with a hash that is right ----------------------------------------------------------------------------


def resealed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tree = json.loads(path.read_bytes())
    del tree["sha256"]
    change(tree)
    path.write_bytes(with_checksum(json.dumps(tree).encode()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert command("train", *SMALL, "--quiet", cwd=folder, seconds=60)[0] == 0
    return folder


FEW = ("empty", "loaders without a position", "ranks that are none")
STATES: dict[str, Any] = {
    "empty": {},
    "a recipe that is none": {"recipe": 5},
    "a recipe with other sections": {"recipe": {"model": 5, "run": []}},
    "loaders without a position": {"loaders": [{}]},
    "loaders that are none": {"loaders": 5},
    "scalars that are none": {"scalars": [1]},
    "a loss scale that is none": {"loss_scale": "x"},
    "rates that are none": {"lr": ["x"]},
    "ranks that are none": {"ranks": {}},
    "calls that are none": {"num_calls": "x"},
    "local SGD that is none": {"local_sgd": []},
}


@pytest.mark.parametrize("what", [one if one in FEW else wide(one) for one in STATES])
def test_a_resealed_state_is_one_message(trained: Path, tmp_path: Path, what: str) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    (manifest,) = (tmp_path / "run" / "checkpoints").glob("step-*/manifest.json")

    def change(tree: dict[str, Any]) -> None:
        tree["state"] = {**(tree["state"] if STATES[what] else {}), **STATES[what]}

    resealed(manifest, change)
    words = ["--quiet", "--resume", "latest", "--run.duration", "3step"]
    code, said = command("train", *SMALL, *words, cwd=tmp_path, seconds=30)
    assert code in (1, 2, 3), said
    assert any(word in said for word in ("state", "recipe", "step counter"))


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.update(tensors={}, files={}),
        lambda tree: tree.update(step=2**60),
        wide(lambda tree: tree.update(step=-1)),
        wide(lambda tree: next(iter(tree["files"].values())).update(bytes=-5)),
        lambda tree: next(iter(tree["files"].values())).update(bytes=2**52),
        lambda tree: next(iter(tree["tensors"].values())).update(shape=[2**40, 2**40]),
        wide(lambda tree: next(iter(tree["tensors"].values())).update(shape=[-1])),
        wide(lambda tree: next(iter(tree["tensors"].values())).update(shape=[0] * 9)),
    ],
)
def test_an_absurd_manifest_is_one_message(trained: Path, tmp_path: Path, change: Callable[[Any], Any]) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    (manifest,) = (tmp_path / "run" / "checkpoints").glob("step-*/manifest.json")
    resealed(manifest, change)
    for words in (["checkpoint", "ls", "run"], ["checkpoint", "export", "run", "out"]):
        assert command(*words, cwd=tmp_path)[0] in (0, 1, 2)
    assert command("checkpoint", "verify", "run", cwd=tmp_path)[0] == 1
    code, said = command("train", *SMALL, "--quiet", "--resume", "latest", cwd=tmp_path, seconds=30)
    assert code in (1, 2, 3)
    assert re.search("manifest|checkpoint", said)
