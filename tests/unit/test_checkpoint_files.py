"""Files of a checkpoint: what was written is read, by the safetensors package too; every changed bit is refused; and a
process that is killed before any operation leaves a whole checkpoint behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint import shard
from shoal.checkpoint.disk import KILL_AT, Disk
from shoal.checkpoint.manifest import CHUNK, Entry, Manifest, Piece
from shoal.checkpoint.store import Store
from shoal.errors import ShoalError


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(1100, 1024, generator=generator),  # more than a chunk
        "b/bf16": torch.randn(7, 3, generator=generator).bfloat16(),
        "fp8": torch.randn(16, generator=generator).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.zeros(0, 5),
        "turned": torch.randn(4, 6, generator=generator).T,
        "flags": torch.tensor([True, False]),
    }


def test_what_was_written_is_read_here_and_by_safetensors(tmp_path: Path) -> None:
    written = tensors()
    file = shard.write(tmp_path / "x.safetensors", written, Disk())
    assert file.size == (tmp_path / "x.safetensors").stat().st_size
    assert len(file.hashes) == -(-file.size // CHUNK) > 1
    theirs = load_file(tmp_path / "x.safetensors")
    with shard.Reader(tmp_path / "x.safetensors", file) as reader:
        for key, tensor in written.items():
            rows = tensor.shape[0] if tensor.dim() else 1
            ours = reader.rows(key, shard.NAMES[tensor.dtype], tensor.shape, 0, rows)
            assert bytes(shard.bytes_of(ours)) == bytes(shard.bytes_of(tensor))
            assert torch.equal(theirs[key].float(), tensor.float())
        assert torch.equal(reader.rows("large", "F32", (1100, 1024), 1023, 1030), written["large"][1023:1030])


@pytest.mark.parametrize("place", [0, 3, 20, 300, CHUNK - 1, CHUNK, -1])
def test_one_flipped_bit_is_refused_with_its_file(tmp_path: Path, place: int) -> None:
    path = tmp_path / "step-1" / "x.safetensors"
    path.parent.mkdir()
    written = tensors()
    file = shard.write(path, written, Disk())
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)

    def read_all() -> None:
        with shard.Reader(path, file) as reader:
            for key, tensor in written.items():
                reader.rows(key, shard.NAMES[tensor.dtype], tensor.shape, 0, tensor.shape[0] if tensor.dim() else 1)

    with pytest.raises(ShoalError, match=r"step-1/x.safetensors bytes [\d,]+ to [\d,]+ are not those"):
        read_all()


def test_a_file_that_is_short_missing_or_another_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    file = shard.write(path, tensors(), Disk())
    shard.write(other, {key: tensor.clone().zero_() for key, tensor in tensors().items()}, Disk())
    with pytest.raises(ShoalError, match="are not those that were written"), shard.Reader(other, file) as reader:
        reader.rows("large", "F32", (1100, 1024), 0, 1)
    with pytest.raises(ShoalError, match="and the manifest says F32"), shard.Reader(path, file) as reader:
        reader.rows("b/bf16", "F32", (7, 3), 0, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShoalError, match="bytes, and the manifest says"):
        shard.Reader(path, file)
    path.unlink()
    with pytest.raises(ShoalError, match="cannot be read"):
        shard.Reader(path, file)


# ---- killed ---------------------------------------------------------------------------------------------------------

VALUES = {step: torch.full((1100, 1024), float(step)) for step in (1, 2, 3)}
"""More than one chunk each."""


def save(store: Store, step: int) -> None:
    draft = store.begin(step)
    file = shard.write(draft / "shard-0.safetensors", {"x": VALUES[step]}, store.disk)
    entry = Entry("F32", (1100, 1024), (Piece("shard-0.safetensors", "x", (0, 0), (1100, 1024)),))
    store.commit(Manifest(step=step, tensors={"x": entry}, files={"shard-0.safetensors": file}))
    store.retain(1)


def killed(root: Path, step: int, kill_at: int) -> bool:
    """Save in a process of its own, and kill it before one operation. Whether it came to that."""
    child = os.fork()
    if child == 0:
        try:
            save(Store(root, Disk(kill_at)), step)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def loaded(root: Path) -> tuple[int, float]:
    """The step that a run would go on from, and the one value of its tensor."""
    store = Store(root)
    step = store.steps()[-1]
    manifest = store.manifest(step)
    with shard.Reader(store.path(step) / "shard-0.safetensors", manifest.files["shard-0.safetensors"]) as reader:
        x = reader.rows("x", "F32", (1100, 1024), 0, 1100)
    assert torch.equal(x, x[:1, :1].expand_as(x)), "a mix of two steps"
    return step, float(x[0, 0])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
@pytest.mark.parametrize("again", [False, True])
def test_killed_before_any_operation_a_whole_step_is_left(tmp_path: Path, again: bool) -> None:
    """`again`: the step that is there is saved once more."""
    second = 1 if again else 2
    store = Store(tmp_path / "whole")
    save(store, 1)
    before = store.disk.count
    save(store, second)
    operations = store.disk.count - before
    assert operations > 15
    for kill_at in range(1, operations + 1):
        root = tmp_path / f"{kill_at}"
        save(Store(root), 1)
        assert killed(root, second, kill_at), f"operation {kill_at} of {operations}"
        step, value = loaded(root)
        assert step in (1, second)
        assert value == step
        save(Store(root), 3)  # and what was left is no hindrance
        assert loaded(root) == (3, 3.0)
        assert not list(root.glob(".draft*"))
    assert not killed(tmp_path / "beyond", 1, operations + 100)


def test_the_variable_of_the_environment_kills_too(tmp_path: Path) -> None:
    code = (
        f"from pathlib import Path; from shoal.checkpoint.disk import Disk; Disk().make(Path({str(tmp_path / 'x')!r}))"
    )
    ended = subprocess.run([sys.executable, "-c", code], env={**os.environ, KILL_AT: "1"}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "x").exists()


def test_the_last_step_is_never_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 3):
        draft = store.begin(step)
        file = shard.write(draft / "a.safetensors", {"x": torch.zeros(2)}, store.disk)
        entry = Entry("F32", (2,), (Piece("a.safetensors", "x", (0,), (2,)),))
        store.commit(Manifest(step=step, tensors={"x": entry}, files={"a.safetensors": file}))
    assert store.retain(2) == [1]
    assert store.retain(0) == [2]
    assert store.steps() == [3]
    assert (tmp_path / "latest").read_text() == "step-00000003\n"
    with pytest.raises(ShoalError, match="no checkpoint of step 1"):
        store.manifest(1)
