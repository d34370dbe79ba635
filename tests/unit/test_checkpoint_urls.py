"""`shoal checkpoint ls | verify | diff | export` of checkpoints at a URL."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint.storage import shard_file
from shoal.checkpoint.storage.manifest import Entry, Manifest, Piece
from shoal.checkpoint.storage.store import Store
from shoal.cli.checkpoint import main
from tests.rejects import rejects

SHAPE = (1100, 1024)
"""More than one chunk."""


def values(step: int) -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) * step


@pytest.fixture
def url() -> Iterator[str]:
    """Two steps, and a third one whose save was cut off."""
    url = f"memory://{uuid.uuid4().hex}/run"
    store = Store.at(url)
    for step in (1, 2, 3):
        store.begin(step)
        file = shard_file.write(store.draft(step) / "shard-0.safetensors", {"w": values(step)}, store.disk)
        entry = Entry("F32", SHAPE, (Piece("shard-0.safetensors", "w", (0, 0), SHAPE),))
        if step < 3:
            store.commit(Manifest(step=step, tensors={"model/w": entry}, files={"shard-0.safetensors": file}))
    yield url
    fsspec.filesystem("memory").store.clear()


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def damage(url: str, step: int) -> None:
    path = f"{url}/step-{step:08d}/shard-0.safetensors"
    data = bytearray(fsspec.filesystem("memory").cat_file(path))
    data[-1] ^= 1
    fsspec.filesystem("memory").pipe_file(path, bytes(data))


def test_steps_are_listed_and_verified(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    listed = shown(capsys, "ls", url)["checkpoints"]
    assert [(one["step"], one["is_latest"], one["problem"]) for one in listed] == [(1, False, None), (2, True, None)]
    assert not listed[0]["saved_at"].startswith("1970")
    assert [one["step"] for one in shown(capsys, "ls", f"{url}/step-00000001")["checkpoints"]] == [1]
    shown(capsys, "verify", url, "--all")
    damage(url, 1)
    shown(capsys, "verify", url)  # the newest
    found = shown(capsys, "verify", url, "--all", code=1)
    assert "differ from what was written" in str(found)
    shown(capsys, "verify", f"{url}/step-00000001", code=1)
    shown(capsys, "verify", url, "--step", "1", code=1)


def test_steps_are_compared_and_exported(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, "export", url, str(tmp_path / "new"))
    assert torch.equal(load_file(tmp_path / "new")["w"], values(2))
    shown(capsys, "export", url, str(tmp_path / "old"), "--step", "1")
    assert torch.equal(load_file(tmp_path / "old")["w"], values(1))
    shown(capsys, "diff", url, f"{url}/step-00000002")
    shown(capsys, "diff", url, f"{url}/step-00000001", code=1)
    damage(url, 2)
    with rejects("C008", "differ from what was written"):
        main(["export", url, str(tmp_path / "damaged")])


def test_what_is_not_there_is_said(url: str, tmp_path: Path) -> None:
    with rejects("C002", "no checkpoint of step 3", "saved steps are 1, 2"):
        main(["verify", url, "--step", "3"])
    with rejects("C001", f"{url}/elsewhere"):
        main(["ls", f"{url}/elsewhere"])
    with rejects("R043", "memory://"):
        main(["export", str(tmp_path), "memory://somewhere/else"])
    with rejects("R043", url):
        main(["merge", url, str(tmp_path / "merged")])
