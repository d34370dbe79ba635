"""Token shards that are shortened while a run reads them, and data that is given where a recipe is expected."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from shoal.cli.train import _naming_shortened_data
from shoal.config.load import load_recipe
from shoal.errors import RunFailed
from shoal.launch.local import launch
from shoal.train.recipe.preflight import preflight
from tests.cli.host import Host, until

WORDS = [
    *["train", "--model.num_layers", "1", "--model.hidden", "16", "--model.ffn", "16", "--model.vocabulary", "257"],
    *[
        "--data.seq_len",
        "16",
        "--data.global_batch",
        "4",
        "--device",
        "cpu",
        "--launch.threads",
        "1",
        "--run.dir",
        "run",
    ],
]


@pytest.mark.parametrize(("nproc", "workers", "name"), [("2", "0", "t.bin"), ("1", "0", "t.npy"), ("1", "1", "t.bin")])
def test_a_shard_that_is_shortened_during_a_run_is_named_once(
    host: Host, tmp_path: Path, nproc: str, workers: str, name: str
) -> None:
    tokens = (np.arange(2_000_000) % 251).astype(np.uint8)
    file = tmp_path / name
    np.save(file, tokens) if name.endswith("npy") else tokens.tofile(file)
    data = ["--data.source", name, "--data.token_dtype", "uint8", "--data.workers", workers]
    started = host.start(*WORDS, *data, "--nproc", nproc, "--run.duration", "100000step", cwd=tmp_path)
    until(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), started)
    os.truncate(file, 5000)
    assert started.wait(60) == 3, started.said
    assert started.said.count(f"{file} was shortened") == 1, started.said
    assert "restarting all workers" not in started.said
    assert "Traceback" not in started.said
    assert "fix: " in started.said


def test_data_in_place_of_a_recipe_is_answered_with_a_command_that_works(host: Host, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("It was a dark and stormy night.\n" * 400)
    (tmp_path / "notes.md").write_text("Title: of a text\n\tthat is no: YAML: at all\n" * 200)
    (tmp_path / "rows.jsonl").write_text('{"text": "a row of its own"}\n' * 400)
    (tmp_path / "keys.txt").write_text("Author: somebody\nYear: 1999\n")
    (tmp_path / "tokens.bin").write_bytes(bytes(range(250)) * 100)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    for name in ("corpus.txt", "notes.md", "rows.jsonl", "keys.txt", "tokens.bin", "empty.txt", "folder"):
        ended = host.run("train", name, cwd=tmp_path)
        assert ended.code == 2, (name, ended.said)
        assert f"fix: shoal train --data.source {name}" in " ".join(ended.said.split()), (name, ended.said)
    more = ["--run.duration", "1step", "--run.fast_dev_run", "--device", "cpu", "--data.seq_len", "64", "--nproc", "1"]
    more += ["--model.num_layers", "1", "--model.hidden", "32", "--model.ffn", "48"]
    for name in ("corpus.txt", "notes.md", "rows.jsonl"):
        ended = host.run("train", "--data.source", name, *more, cwd=tmp_path)
        assert ended.code == 0, (name, ended.said)


def read_beyond_the_end(placement: object, store: object, file: Path) -> None:
    tokens = np.memmap(file, dtype=np.uint8, mode="r")
    os.truncate(file, 10)
    int(tokens[-1])


def test_a_process_that_was_killed_for_a_shortened_file_is_told_with_its_name(tmp_path: Path) -> None:
    """Between the look at its size and the read, a file may still become shorter."""
    file = tmp_path / "tokens.bin"
    file.write_bytes(bytes(100) * 1000)
    settings = {"data.source": str(file), "data.token_dtype": "uint8", "launch.device": "cpu", "plan": "fp32"}
    job = preflight(load_recipe(None, settings.items()), 1)
    with pytest.raises(RunFailed, match="signal 7") as killed, _naming_shortened_data(job):
        launch(read_beyond_the_end, (shutil.copy(file, tmp_path / "other.bin"),), nproc=1)
    assert killed.value.may_pass
    with pytest.raises(RunFailed, match=rf"{file} was shortened") as named, _naming_shortened_data(job):
        launch(read_beyond_the_end, (file,), nproc=1)
    assert not named.value.may_pass
    assert named.value.problems[0].fix
