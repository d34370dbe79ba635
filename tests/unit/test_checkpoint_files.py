"""Files of a checkpoint: what was written is read, by the safetensors package too; every changed bit is refused; and a
process that is killed before any operation leaves a whole checkpoint behind."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from shoal.blueprint.faults import VARIABLE, Faults
from shoal.checkpoint.storage import shard_file
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.manifest import CHUNK, NAME, Entry, File, Manifest, Piece
from shoal.checkpoint.storage.store import Store
from shoal.errors import ShoalError
from tests.cover import examples, wide
from tests.rejects import rejects
from tests.warm import warm_python


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
    file = shard_file.write(tmp_path / "x.safetensors", written, Filesystem())
    assert file.size == (tmp_path / "x.safetensors").stat().st_size
    assert len(file.hashes) == -(-file.size // CHUNK) > 1
    theirs = load_file(tmp_path / "x.safetensors")
    with shard_file.Reader(tmp_path / "x.safetensors", file) as reader:
        for key, tensor in written.items():
            rows = tensor.shape[0] if tensor.dim() else 1
            ours = reader.rows(key, shard_file.NAMES[tensor.dtype], tensor.shape, 0, rows)
            assert bytes(shard_file.bytes_of(ours)) == bytes(shard_file.bytes_of(tensor))
            assert torch.equal(theirs[key].float(), tensor.float())
        assert torch.equal(reader.rows("large", "F32", (1100, 1024), 1023, 1030), written["large"][1023:1030])


@pytest.mark.parametrize("place", [0, 3, 20, 300, CHUNK - 1, CHUNK, -1])
def test_one_flipped_bit_is_refused_with_its_file(tmp_path: Path, place: int) -> None:
    path = tmp_path / "step-1" / "x.safetensors"
    path.parent.mkdir()
    written = tensors()
    file = shard_file.write(path, written, Filesystem())
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)

    def read_all() -> None:
        with shard_file.Reader(path, file) as reader:
            for key, tensor in written.items():
                reader.rows(
                    key, shard_file.NAMES[tensor.dtype], tensor.shape, 0, tensor.shape[0] if tensor.dim() else 1
                )

    with rejects("C008", match=r"step-1/x.safetensors bytes [\d,]+ to [\d,]+ differ from"):
        read_all()


def test_a_file_that_is_short_missing_or_another_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    file = shard_file.write(path, tensors(), Filesystem())
    shard_file.write(other, {key: tensor.clone().zero_() for key, tensor in tensors().items()}, Filesystem())
    with rejects("C008", match="differ from what was written"), shard_file.Reader(other, file) as reader:
        reader.rows("large", "F32", (1100, 1024), 0, 1)
    with rejects("C008", match="and the manifest lists F32"), shard_file.Reader(path, file) as reader:
        reader.rows("b/bf16", "F32", (7, 3), 0, 1)
    path.write_bytes(path.read_bytes()[:-1])
    with rejects("C008", match="bytes, and the manifest lists"):
        shard_file.Reader(path, file)
    path.unlink()
    with rejects("C008", match="cannot be read"):
        shard_file.Reader(path, file)


def part(*slices: tuple[int, int]) -> tuple[slice, ...]:
    return tuple(slice(*one) for one in slices)


def test_a_part_is_filled_where_it_belongs(tmp_path: Path) -> None:
    written = tensors()
    file = shard_file.write(tmp_path / "x", written, Filesystem())
    large = written["large"]
    with shard_file.Reader(tmp_path / "x", file) as reader:
        same = torch.zeros(500, 1024)
        reader.fill(same, "large", "F32", (1100, 1024), part((100, 600), (0, 1024)))
        assert torch.equal(same, large[100:600])
        columns = torch.zeros(1100, 7)
        reader.fill(columns, "large", "F32", (1100, 1024), part((0, 1100), (1000, 1007)))
        assert torch.equal(columns, large[:, 1000:1007])
        spread = torch.zeros(4, 2 * 1024)[:, ::2]
        reader.fill(spread, "large", "F32", (1100, 1024), part((1090, 1094), (0, 1024)))
        assert torch.equal(spread, large[1090:1094])
        double = torch.zeros(3, 1024, dtype=torch.float64)
        reader.fill(double, "large", "F32", (1100, 1024), part((7, 10), (0, 1024)))
        assert torch.equal(double, large[7:10].double())
        scalar = torch.tensor(0.0)
        reader.fill(scalar, "scalar", "F64", (), ())
        assert scalar == 3.0
        empty = torch.zeros(0, 5)
        reader.fill(empty, "empty", "F32", (0, 5), part((0, 0), (0, 5)))


def test_many_small_tensors_are_read_in_any_order(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    written = {f"t{n}": torch.randn(50_000 + n, generator=generator) for n in range(60)}  # a dozen chunks
    file = shard_file.write(tmp_path / "x", written, Filesystem())
    assert len(file.hashes) >= 3
    shared = shard_file.Reading(most_chunks=2)
    with shard_file.Reader(tmp_path / "x", file, reading=shared) as reader:
        for key in [*written, *reversed(written), *sorted(written)]:
            rows = reader.rows(key, "F32", written[key].shape, 0, len(written[key]))
            assert torch.equal(rows, written[key])
    shared.close()


# ---- headers that cannot be -----------------------------------------------------------------------------------------

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
SECOND = {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]}


def crafted(folder: Path, header: object, data: bytes = bytes(28), length: int | None = None) -> tuple[Path, File]:
    """A file with any header, whose hashes are right."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = (len(text) if length is None else length).to_bytes(8, "little") + text + data
    path = folder / "step-9" / "made-up.safetensors"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(whole)
    return path, File(
        len(whole), tuple(hashlib.sha256(whole[i : i + CHUNK]).hexdigest() for i in range(0, len(whole), CHUNK))
    )


def test_a_header_that_can_be_is_read(tmp_path: Path) -> None:
    with shard_file.Reader(*crafted(tmp_path, {"__metadata__": {"format": "pt"}, "b": SECOND, "a": ENTRY})) as reader:
        assert reader.rows("b", "U8", (4,), 1, 3).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (b"", "an invalid header"),
        (b"\x80\x04pickle", "an invalid header"),
        ([], "no keys and values"),
        ({"a": ENTRY}, "24 bytes, and the file has 28"),
        ({"a": ENTRY, "b": {**SECOND, "data_offsets": [20, 24]}}, "begins at 20"),
        ({"a": ENTRY, "b": {**SECOND, "data_offsets": [25, 29]}}, "begins at 25"),
        ({"a": {**ENTRY, "data_offsets": [-24, 0]}, "b": SECOND}, "is at"),
        ({"a": {**ENTRY, "data_offsets": [24, 0]}, "b": SECOND}, "is at"),
        ({"a": {**ENTRY, "data_offsets": [0, 2**60]}, "b": SECOND}, "is at"),
        ({"a": {**ENTRY, "data_offsets": [0.0, 24.0]}, "b": SECOND}, "is at"),
        ({"a": {**ENTRY, "data_offsets": [False, 24]}, "b": SECOND}, "is at"),
        ({"a": {**ENTRY, "data_offsets": "ab"}, "b": SECOND}, "is at"),
        ({"a": {**ENTRY, "data_offsets": [0]}, "b": SECOND}, "is at"),
        ({"a": {**ENTRY, "shape": [2**40, 2**40]}, "b": SECOND}, "the shape"),
        ({"a": {**ENTRY, "shape": [2**40, 0, 2**40], "data_offsets": [0, 0]}}, "the shape"),
        ({"a": {**ENTRY, "shape": [-2, -3]}, "b": SECOND}, "the shape"),
        ({"a": {**ENTRY, "shape": [2, 4]}, "b": SECOND}, "is at"),
        ({"a": {**ENTRY, "shape": None}, "b": SECOND}, "the shape"),
        ({"a": {**ENTRY, "dtype": "F3"}, "b": SECOND}, "the dtype 'F3'"),
        ({"a": {**ENTRY, "dtype": ["F32"]}, "b": SECOND}, "the dtype"),
        ({"a": 3, "b": SECOND}, "no dtype"),
        ({"a": {**ENTRY, "more": 1}, "b": SECOND}, "no dtype"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" * 90 + b"]" * 90, "levels deep"),
        (b'{"\\ud800": 1}', "an invalid header"),
    ],
)
def test_a_header_that_cannot_be_is_refused_with_its_file(tmp_path: Path, header: object, what: str) -> None:
    with rejects("C008", "step-9/made-up.safetensors") as told:
        shard_file.Reader(*crafted(tmp_path, header))
    assert what in str(told.value)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10_000, 29])
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, length: int) -> None:
    with rejects("C008", match="made-up"):
        shard_file.Reader(*crafted(tmp_path, {}, length=length))


@pytest.mark.parametrize("data", [b"", b"1234567"])
def test_a_file_that_has_no_header_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with rejects("C008", match="header"):
        shard_file.Reader(path, File(len(data), (hashlib.sha256(data).hexdigest(),) * bool(data)))


ANY = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.lists(st.integers(), max_size=3)
)


@given(st.data())
@settings(max_examples=examples(80, 200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_header_is_refused_or_says_what_can_be(tmp_path: Path, data: st.DataObject) -> None:
    tree: dict[str, Any] = {"a": dict(ENTRY), "b": dict(SECOND)}
    for _ in range(data.draw(st.integers(1, 3))):
        entry = tree[data.draw(st.sampled_from(sorted(tree)))]
        key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        near = st.sampled_from(["F32", "U8", [2, 3], [4], [24], [0, 24], [24, 28], [0, 0], [28, 28], [4, 28]])
        entry[key] = data.draw(near | ANY)
    try:
        reader = shard_file.Reader(*crafted(tmp_path, tree))
    except ShoalError:
        return
    with reader:
        for key, entry in reader.header.items():
            rows = reader.rows(key, entry["dtype"], entry["shape"], 0, entry["shape"][0] if entry["shape"] else 1)
            assert list(rows.shape) == entry["shape"]


# ---- killed ---------------------------------------------------------------------------------------------------------

VALUES = {step: torch.full((1100, 1024), float(step)) for step in (1, 2, 3)}
"""More than one chunk each."""


def save(store: Store, step: int) -> None:
    draft = store.begin(step)
    file = shard_file.write(draft / "shard-0.safetensors", {"x": VALUES[step]}, store.disk)
    entry = Entry("F32", (1100, 1024), (Piece("shard-0.safetensors", "x", (0, 0), (1100, 1024)),))
    store.commit(Manifest(step=step, tensors={"x": entry}, files={"shard-0.safetensors": file}))
    store.retain(1)


def killed(root: Path, step: int, kill_at: int) -> bool:
    """Save in a process of its own, and kill it before one operation. Whether it came to that."""
    child = os.fork()
    if child == 0:
        try:
            save(Store(root, Filesystem(Faults.parse(f"kill_at=write:{kill_at}"))), step)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def loaded(root: Path) -> tuple[int, float]:
    """The step that a run would go on from, and the one value of its tensor."""
    store = Store(root)
    step = store.steps()[-1]
    manifest = store.manifest(step)
    with shard_file.Reader(store.path(step) / "shard-0.safetensors", manifest.files["shard-0.safetensors"]) as reader:
        x = reader.rows("x", "F32", (1100, 1024), 0, 1100)
    assert torch.equal(x, x[:1, :1].expand_as(x)), "a mix of two steps"
    return step, float(x[0, 0])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
@pytest.mark.parametrize("again", [wide(False), True])
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
    imports = "from pathlib import Path; from shoal.checkpoint.storage.filesystem import Filesystem"
    code = f"{imports}; Filesystem().make(Path({str(tmp_path / 'x')!r}))"
    ended = subprocess.run([warm_python(), "-c", code], env={**os.environ, VARIABLE: "kill_at=write:1"}, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "x").exists()


def test_the_last_step_is_never_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 3):
        draft = store.begin(step)
        file = shard_file.write(draft / "a.safetensors", {"x": torch.zeros(2)}, store.disk)
        entry = Entry("F32", (2,), (Piece("a.safetensors", "x", (0,), (2,)),))
        store.commit(Manifest(step=step, tensors={"x": entry}, files={"a.safetensors": file}))
    assert store.retain(2) == [1]
    assert store.retain(0) == [2]
    assert store.steps() == [3]
    assert (tmp_path / "latest").read_text() == "step-00000003\n"
    with rejects("C002", "step 1"):
        store.manifest(1)


# ---- operations that fail -------------------------------------------------------------------------------------------


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


FAILURES = [(reason, again) for reason in ("ENOSPC", "EIO", "EACCES") for again in (False, True)]


@pytest.mark.parametrize(("reason", "again"), [row if row == ("EIO", True) else wide(*row) for row in FAILURES])
def test_whatever_operation_fails_a_whole_step_is_left(tmp_path: Path, reason: str, again: bool) -> None:
    second = 1 if again else 2
    store = Store(tmp_path / "whole")
    save(store, 1)
    before = store.disk.count
    save(store, second)
    operations = store.disk.count - before
    files = open_files()
    for fail_at in range(1, operations + 1):
        root = tmp_path / f"{fail_at}"
        save(Store(root), 1)
        with pytest.raises(OSError, match=str(root)) as told:  # it says which file
            save(Store(root, Filesystem(Faults.parse(f"disk_full_at=write:{fail_at},errno:{reason}"))), second)
        assert told.value.strerror
        step, value = loaded(root)
        assert step in (1, second)
        assert value == step
        save(Store(root), 3)
        assert loaded(root) == (3, 3.0)
        assert not list(root.glob(".draft*"))
    assert open_files() == files


def test_a_save_that_fails_while_it_commits_leaves_no_draft(tmp_path: Path) -> None:
    store = Store(tmp_path, Filesystem(Faults.parse("disk_full_at=save:1,write:7")))
    with pytest.raises(OSError, match="No space left on device"):
        save(store, 1)
    assert store.disk.count == 8, "the manifest, and the removal"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", range(1, 15))  # after the 14th operation, nothing is written
def test_one_bit_that_the_disk_turned_is_refused(tmp_path: Path, number: int) -> None:
    save(Store(tmp_path), 1)
    save(Store(tmp_path, Filesystem(Faults.parse(f"corrupt_at=write:{number}"))), 2)
    try:
        assert loaded(tmp_path) == (2, 2.0)
        is_refused = False
    except ShoalError:
        is_refused = True
    is_of_latest = (tmp_path / "latest").read_bytes() != b"step-00000002\n"
    assert is_refused != is_of_latest, "only `latest` is not looked at"


def test_a_slow_disk_is_slow(tmp_path: Path) -> None:
    began = time.perf_counter()
    save(Store(tmp_path, Filesystem(Faults.parse("slow_disk_at=save:1,write:3,seconds:0.5 slow_disk_at=save:2"))), 1)
    assert time.perf_counter() - began >= 0.5
    assert loaded(tmp_path) == (1, 1.0)


def test_faults_count_the_saves_of_every_rank(tmp_path: Path) -> None:
    """A rank that does not begin or commit knows a save by the draft that it writes to."""
    disk = Filesystem(Faults.parse("disk_full_at=save:2,write:2"))
    store = Store(tmp_path, disk)
    tmp_path.joinpath(".draft-step-00000001").mkdir()
    shard_file.write(store.draft(1) / "x", {"x": torch.zeros(3)}, disk)
    tmp_path.joinpath(".draft-step-00000002").mkdir()
    with pytest.raises(OSError, match="No space left"):
        shard_file.write(store.draft(2) / "x", {"x": torch.zeros(3)}, disk)


def test_operations_are_counted_alike_every_time(tmp_path: Path) -> None:
    counts = set()
    for number in range(3):
        store = Store(tmp_path / f"{number}")
        save(store, 1)
        counts.add(store.disk.count)
    assert len(counts) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with 12 MB."""
    path = tmp_path / "small"
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("only root can mount a small file system")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_leaves_what_was_there_and_room_says_so_before(small_disk: Path) -> None:
    store = Store(small_disk)
    save(store, 1)
    store.room(2**20)
    with rejects("C010", match=r"has 0\.\d\d GiB free, and a checkpoint needs 3\.00 GiB") as told:
        store.room(3 * 2**30)
    assert "run.save(ELSEWHERE)" in str(told.value)
    (small_disk / "other").write_bytes(bytes(6 * 2**20))
    with pytest.raises(OSError, match="No space left on device") as full:
        save(store, 2)
    assert "shard-0.safetensors" in str(full.value)
    store.abandon(2)
    assert not list(small_disk.glob(".draft*"))
    assert loaded(small_disk) == (1, 1.0)


def test_a_disk_that_cannot_be_written_to_is_refused_before(small_disk: Path) -> None:
    save(Store(small_disk), 1)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with rejects("C009", match="cannot be written to: Read-only file system"):
        Store(small_disk).room(1)
    with pytest.raises(OSError, match="Read-only"):
        save(Store(small_disk), 2)
    assert loaded(small_disk) == (1, 1.0)


def test_a_place_below_a_file_is_refused_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with rejects("C009", match="cannot be written to: Not a directory"):
        Store(tmp_path / "file" / "below").room(1)


def test_a_directory_that_is_removed_under_us_fails_the_save_alone(tmp_path: Path) -> None:
    root = tmp_path / "gone"
    store = Store(root)
    save(store, 1)
    draft = store.begin(2)
    shutil.rmtree(root)
    with pytest.raises(FileNotFoundError):
        shard_file.write(draft / "shard-0.safetensors", {"x": VALUES[2]}, store.disk)
    with pytest.raises(FileNotFoundError):
        store.commit(Manifest(step=2, tensors={}, files={}))
    store.abandon(2)
    assert store.steps() == []
    save(store, 3)
    assert loaded(root) == (3, 3.0)


# ---- which steps are there ------------------------------------------------------------------------------------------


def small(store: Store, step: int) -> None:
    draft = store.begin(step)
    file = shard_file.write(draft / "a.safetensors", {"x": torch.full((2,), float(step))}, store.disk)
    entry = Entry("F32", (2,), (Piece("a.safetensors", "x", (0,), (2,)),))
    store.commit(Manifest(step=step, tensors={"x": entry}, files={"a.safetensors": file}))


def test_the_newest_good_step_is_found_and_the_others_told(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.latest_valid() == (None, {})
    for step in (1, 2, 3, 4):
        small(store, step)
    assert store.latest_valid() == (4, {})
    (store.path(4) / NAME).write_bytes(b"{")
    (store.path(3) / "a.safetensors").write_bytes(b"short")
    (store.path(2) / "a.safetensors").unlink()
    step, wrong = store.latest_valid()
    assert step == 1
    assert "step-00000004: the manifest is not JSON" in wrong[4]
    assert "step-00000003/a.safetensors has 5 bytes" in wrong[3]
    assert "step-00000002/a.safetensors cannot be read: No such file" in wrong[2]
    assert store.latest_valid([3, 4])[0] is None


def test_retention_keeps_the_last_good_one(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 3, 4):
        small(store, step)
    for step in (3, 4):
        (store.path(step) / "a.safetensors").unlink()
    assert store.retain(2) == [1]
    assert store.steps() == [2, 3, 4]
    small(store, 5)
    assert store.retain(1) == [2, 3, 4]
    assert store.steps() == [5]


def test_later_steps_are_set_aside_and_none_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 3):
        small(store, step)
    assert store.archive(after=3) == []
    assert store.archive(after=1) == [2, 3]
    assert store.steps() == [1]
    assert (tmp_path / "latest").read_text() == "step-00000001\n"
    small(store, 2)
    small(store, 3)
    assert store.archive(after=2) == [3]
    store.retain(1)
    names = {path.name for path in tmp_path.iterdir()}
    asides = {"aside-step-00000002", "aside-step-00000003", "aside-step-00000003.2"}
    assert names == {"step-00000002", "latest", *asides}
    assert all((tmp_path / name / NAME).exists() for name in asides)
    assert store.archive(after=0) == [2]
    assert store.steps() == []
    assert not (tmp_path / "latest").exists()
