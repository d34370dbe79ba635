"""Checkpoints at a URL: the same guarantees without rename, and clear errors for unknown stores."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from shoal.blueprint.faults import Faults
from shoal.checkpoint.storage import shard_file
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.manifest import NAME, Entry, Manifest, Piece
from shoal.checkpoint.storage.object_store import ObjectStore
from shoal.checkpoint.storage.store import Store
from shoal.errors import StoreTaken
from tests.rejects import rejects

VALUES = {step: torch.full((1100, 1024), float(step)) for step in (1, 2, 3, 4)}
"""More than one chunk each."""


def save(store: Store, step: int, keep: int = 1) -> None:
    store.begin(step)
    file = shard_file.write(store.draft(step) / "shard-0.safetensors", {"x": VALUES[step]}, store.disk)
    entry = Entry("F32", (1100, 1024), (Piece("shard-0.safetensors", "x", (0, 0), (1100, 1024)),))
    store.commit(Manifest(step=step, tensors={"x": entry}, files={"shard-0.safetensors": file}))
    store.retain(keep)


def loaded(store: Store, step: int | None = None) -> tuple[int, float]:
    step = store.steps()[-1] if step is None else step
    file = store.manifest(step).files["shard-0.safetensors"]
    with shard_file.Reader(store.path(step) / "shard-0.safetensors", file, disk=store.disk) as reader:
        x = reader.rows("x", "F32", (1100, 1024), 0, 1100)
        assert torch.equal(reader.rows("x", "F32", (1100, 1024), 1020, 1030), x[1020:1030])
    assert torch.equal(x, x[:1, :1].expand_as(x)), "a mix of two steps"
    return step, float(x[0, 0])


@pytest.fixture(params=["memory", "chained", "fsspec's local files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    name = uuid.uuid4().hex
    if request.param == "memory":
        yield Store.at(f"memory://{name}/run")
    elif request.param == "chained":
        yield Store.at(f"dir::memory://{name}")
    else:
        yield Store(tmp_path / "run", ObjectStore(LocalFileSystem()))
    fsspec.filesystem("memory").store.clear()


def test_steps_are_saved_and_loaded_and_go(store: Store) -> None:
    assert not store.disk.renames
    assert store.steps() == []
    store.room(2**60)  # nobody knows
    assert store.disk.names(store.root) == []
    for step in (1, 2, 3):
        save(store, step, keep=2)
        assert loaded(store) == (step, float(step))
    assert store.steps() == [2, 3]
    assert store.disk.names(store.root) == ["latest", "step-00000002", "step-00000003"]
    assert store.disk.read(store.root / "latest", 100) == b"step-00000003\n"
    assert store.latest_valid() == (3, {})
    assert loaded(store, 2) == (2, 2.0)


def test_the_run_that_claims_a_store_last_is_the_only_one_that_saves(store: Store) -> None:
    first, second = store, Store(store.root, store.disk, where=store.where)
    first.claim("a on node1")
    save(first, 1, keep=9)
    first.begin(2)
    second.claim("b on\nnode2")
    second.begin(2)
    shard_file.write(second.draft(2) / "shard-0.safetensors", {"x": VALUES[2]}, second.disk)
    for act in (
        lambda: first.commit(Manifest(step=2, tensors={}, files={})),
        lambda: first.begin(3),
        lambda: first.retain(1),
    ):
        with rejects("C052", r"'b on\nnode2'") as error:
            act()
        assert isinstance(error.value, StoreTaken)
        assert not error.value.may_pass
    first.abandon(2)
    assert second.disk.has(second.draft(2) / "shard-0.safetensors")
    save(second, 2, keep=9)
    assert second.steps() == [1, 2]
    second.disk.remove(second.root / "writer")  # a user may remove all of it
    save(second, 3, keep=9)


def test_a_local_directory_needs_no_writer(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.claim("a")
    save(store, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_a_step_is_there_when_its_manifest_is(store: Store) -> None:
    save(store, 1)
    store.begin(2)
    shard_file.write(store.draft(2) / "shard-0.safetensors", {"x": VALUES[2]}, store.disk)
    assert store.disk.has(store.draft(2) / "shard-0.safetensors")
    assert store.steps() == [1]
    save(store, 3)  # and what was left goes
    assert store.disk.names(store.root) == ["latest", "step-00000003"]


def test_a_step_is_saved_again(store: Store) -> None:
    save(store, 1)
    VALUES[1].fill_(7.0)
    try:
        save(store, 1)
        assert loaded(store) == (1, 7.0)
        assert store.disk.names(store.root) == ["latest", "step-00000001-2"]
    finally:
        VALUES[1].fill_(1.0)


def test_later_steps_are_set_aside_and_none_is_removed(store: Store) -> None:
    for step in (1, 2, 3):
        save(store, step, keep=5)
    assert store.archive(after=1) == [2, 3]
    assert store.steps() == [1]
    assert store.disk.read(store.root / "latest", 100) == b"step-00000001\n"
    save(store, 2, keep=5)
    assert store.path(2).name == "step-00000002-2"
    assert store.steps() == [1, 2]
    save(store, 4, keep=1)
    assert store.steps() == [4]
    for name in ("step-00000002", "step-00000003"):
        assert store.disk.has(store.root / name / NAME)


def test_a_turned_bit_is_refused(store: Store) -> None:
    save(store, 1)
    store.disk = type(store.disk)(store.disk.system, Faults.parse("corrupt_at=write:1"))  # type: ignore[attr-defined, call-arg]
    save(store, 2)
    with rejects("C008", "step-00000002/shard-0.safetensors", "bytes 0"):
        loaded(store)


def saved_by_a_child(root: Path, step: int, faults: str) -> int:
    """How it ended: 0, or the signal that it was killed by."""
    child = os.fork()
    if child == 0:
        try:
            save(Store(root, ObjectStore(LocalFileSystem(), Faults.parse(faults))), step)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
@pytest.mark.parametrize("again", [False, True])
def test_killed_before_any_operation_a_whole_step_is_left(tmp_path: Path, again: bool) -> None:
    second = 1 if again else 2
    whole = Store(tmp_path / "whole", ObjectStore(LocalFileSystem()))
    save(whole, 1)
    before = whole.disk.count
    save(whole, second)
    operations = whole.disk.count - before
    assert operations >= 9
    for number in range(1, operations + 1):
        root = tmp_path / f"{number}"
        store = Store(root, ObjectStore(LocalFileSystem()))
        save(store, 1)
        assert saved_by_a_child(root, second, f"kill_at=write:{number}") == signal.SIGKILL
        step, value = loaded(store)
        assert step in (1, second)
        assert value == step
        save(store, 3)  # and what was left is no hindrance
        assert store.disk.names(root) == ["latest", "step-00000003"]


@pytest.mark.parametrize("number", range(1, 11))
def test_whatever_operation_fails_a_whole_step_is_left(tmp_path: Path, number: int) -> None:
    store = Store(tmp_path, ObjectStore(LocalFileSystem()))
    save(store, 1)
    broken = Store(tmp_path, ObjectStore(LocalFileSystem(), Faults.parse(f"disk_full_at=write:{number},errno:EIO")))
    with pytest.raises(OSError, match="Input/output error"):
        save(broken, 2)
    step, value = loaded(store)
    assert value == step


def test_a_url_of_this_machine_is_its_disk(tmp_path: Path) -> None:
    for where in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        store = Store.at(where)
        assert type(store.disk) is Filesystem
        assert store.root == tmp_path
        assert store.where == str(where)
    save(Store.at(f"file://{tmp_path}"), 1)
    assert loaded(Store(tmp_path)) == (1, 1.0)


def test_a_store_that_is_not_there_is_told_with_what_to_install() -> None:
    if find_spec("s3fs") is None:
        with rejects("R027", match="s3://bucket/run needs the package s3fs") as told:
            Store.at("s3://bucket/run")
        assert "pip install s3fs" in str(told.value)
    with rejects("C016", match="Protocol not known: memry") as told:
        Store.at("memry://x/run")
    assert "memory://" in str(told.value)


def test_a_store_that_cannot_be_written_to_is_refused_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "below", ObjectStore(LocalFileSystem()), where="far://away")
    with rejects("C009", match="far://away cannot be written to: "):
        store.room(1)
