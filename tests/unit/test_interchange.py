"""Checkpoints to other formats and back: what was written is what others read, in little memory, there as a whole or
not at all; and what others have written is read without running anything of it."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shoal
from shoal.blueprint.faults import Faults
from shoal.checkpoint.diff import Comparison, compare
from shoal.checkpoint.formats import dcp, lazy_tensor, safetensors
from shoal.checkpoint.formats.export import FORMATS, ExportSettings, export
from shoal.checkpoint.formats.huggingface import config_of, model_of
from shoal.checkpoint.formats.import_ import ImportSettings as HowToImport
from shoal.checkpoint.formats.import_ import import_checkpoint, read
from shoal.checkpoint.storage import shard_file
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.locate import SavedStep, find
from shoal.checkpoint.storage.manifest import Entry, File, Manifest, Piece
from shoal.checkpoint.storage.store import Store
from shoal.errors import RunFailed, ShoalError
from shoal.models import llama
from shoal.numerics.init import initialise
from tests.cover import wide
from tests.rejects import rejects

LLAMA: dict[str, Any] = {
    "num_layers": 2, "hidden": 16, "num_heads": 4, "num_kv_heads": 2, "vocabulary": 37, "ffn": 22, "max_sequence": 64,
}  # fmt: skip


def nobody(size: int) -> None:
    """Listens."""


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """So that a tensor of 1.3 MB is read in several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_tensor, "BLOCK", 2**19)
        patch.setattr(shard_file, "BLOCK", 2**20)
        yield


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(2100, 160, generator=generator),  # more than is read at a time
        "narrow": torch.randn(7, 3, generator=generator).bfloat16(),
        "eight": torch.randn(16, 4, generator=generator).to(torch.float8_e4m3fn),
        "one": torch.tensor(3.0, dtype=torch.float64),
        "none": torch.zeros(0, 5),
        "flags": torch.tensor([True, False, True]),
        "count": torch.tensor([2**60 + 1, -5]),
    }


def keep(
    root: Path, tensors: dict[str, Tensor], *, cut: str, step: int = 3, state: dict[str, Any] | None = None
) -> SavedStep:
    """A checkpoint as a layout would write it: whole, by rows on two ranks, or by columns on three."""
    store = Store(root)
    draft = store.begin(step)
    files: dict[str, dict[str, Tensor]] = {}
    entries: dict[str, Entry] = {}
    for name, tensor in tensors.items():
        dim = {"rows": 0, "columns": tensor.dim() - 1}.get(cut, 0)
        num_parts = {"rows": 2, "columns": 3}.get(cut, 1) if tensor.dim() and tensor.numel() else 1
        pieces, at = [], 0
        for rank, part in enumerate(tensor.tensor_split(num_parts, dim) if num_parts > 1 else (tensor,)):
            begin = tuple(at if d == dim else 0 for d in range(tensor.dim()))
            at += part.shape[dim] if tensor.dim() else 0
            if part.numel() or num_parts == 1:
                file, key = f"shard-{rank:05d}.safetensors", f"{name}@{rank}"
                files.setdefault(file, {})[key] = part.contiguous()
                pieces.append(Piece(file, key, begin, tuple(part.shape)))
        entries[name] = Entry(shard_file.NAMES[tensor.dtype], tuple(tensor.shape), tuple(pieces))
    written: dict[str, File] = {name: shard_file.write(draft / name, kept, store.disk) for name, kept in files.items()}
    store.commit(Manifest(step=step, tensors=entries, files=written, state=state or {}))
    return find(root)


def model_and_states() -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"model/{name}": tensor for name, tensor in values().items()}
    tensors["optimizer/exp_avg/narrow"] = torch.randn(7, 3)
    return tensors, {"scalars": {"narrow": {"step": 12.0}}, "seed": 7}


@pytest.fixture(scope="module", params=["whole", "rows", "columns"])
def step(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedStep:
    tensors, state = model_and_states()
    return keep(tmp_path_factory.mktemp(request.param), tensors, cut=request.param, state=state)


def is_same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and same_bytes(ours, theirs)


def same_bytes(ours: Tensor, theirs: Tensor) -> bool:
    return bytes(shard_file.bytes_of(ours)) == bytes(shard_file.bytes_of(theirs))


def assert_all_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not is_same(found[name], tensor)] == []


# ---- out ------------------------------------------------------------------------------------------------------------


def test_one_safetensors_file_is_what_the_package_reads(step: SavedStep, tmp_path: Path) -> None:
    assert values()["large"].nbytes > shard_file.BLOCK > lazy_tensor.BLOCK
    done = export(step, tmp_path / "a.safetensors", ExportSettings(), nobody)
    found = load_file(tmp_path / "a.safetensors")
    assert_all_same(found, values())
    assert (done.tensors, done.num_bytes) == (len(found), sum(tensor.nbytes for tensor in found.values()))
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_states_of_the_optimizer_come_along_if_asked_for(step: SavedStep, tmp_path: Path) -> None:
    export(step, tmp_path / "a.safetensors", ExportSettings(optimizer=True), nobody)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() - values().keys() == {"optimizer/exp_avg/narrow", "optimizer/step/narrow"}
    assert found["optimizer/step/narrow"] == 12.0


def test_a_state_dict_is_what_torch_loads(step: SavedStep, tmp_path: Path) -> None:
    export(step, tmp_path / "a.pt", ExportSettings(format="torch"), nobody)
    assert_all_same(torch.load(tmp_path / "a.pt", weights_only=True), values())
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_dcp_folder_is_what_torch_loads(step: SavedStep, tmp_path: Path) -> None:
    export(step, tmp_path / "a", ExportSettings(format="dcp", optimizer=True), nobody)
    empty = {name: torch.zeros_like(tensor) for name, tensor in values().items()}
    empty["optimizer.state.narrow.exp_avg"] = torch.zeros(7, 3)
    empty["optimizer.state.narrow.step"] = torch.tensor(0.0)
    with warnings.catch_warnings(action="ignore"):
        torch_checkpoint.load(empty, checkpoint_id=tmp_path / "a")
    assert empty.pop("optimizer.state.narrow.step") == 12.0
    assert empty.pop("optimizer.state.narrow.exp_avg").any()
    assert_all_same(empty, values())


def test_a_huggingface_folder_has_files_and_an_index(step: SavedStep, tmp_path: Path) -> None:
    export(step, tmp_path / "a", ExportSettings(format="huggingface", shard_bytes=1e6), nobody)
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    names = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert names == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(set(index["weight_map"].values())) == names
    found: dict[str, Tensor] = {}
    for name in names:
        there = load_file(tmp_path / "a" / name)
        assert {index["weight_map"][key] for key in there} == {name}
        found |= there
    assert_all_same(found, values())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert not (tmp_path / "a" / "config.json").exists()  # nobody says what the model is


@pytest.mark.parametrize("format", FORMATS)
def test_damage_is_not_exported(tmp_path: Path, format: str) -> None:
    step = keep(tmp_path / "store", {"model/x": torch.randn(1100, 1024)}, cut="rows")
    path = step.path / "shard-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with rejects("C008", "shard-00001.safetensors"):
        export(step, tmp_path / "a", ExportSettings(format=format), nobody)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_nothing_is_written_over_by_mistake(step: SavedStep, tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.mkdir()
    (target / "thesis.tex").write_text("five years")
    for overwrite, told in (
        (False, "exists; nothing was changed"),
        (True, "has thesis.tex, which no export has written"),
    ):
        with rejects("C040", match=told):
            export(step, target, ExportSettings(format="dcp", overwrite=overwrite), nobody)
    assert (target / "thesis.tex").read_text() == "five years"
    (target / "thesis.tex").rename(target / "config.json")
    export(step, target, ExportSettings(format="dcp", overwrite=True), nobody)
    export(step, target, ExportSettings(format="huggingface", overwrite=True), nobody)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    for format in ("safetensors", "torch", "dcp", "safetensors"):
        export(step, target, ExportSettings(format=format, overwrite=True), nobody)
        assert target.is_dir() == (format == "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# ---- killed, and out of room ----------------------------------------------------------------------------------------


def killed(step: SavedStep, to: Path, how: ExportSettings, kill_at: int) -> bool:
    """Export in a process of its own, and kill it before one operation. Whether it came to that."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # those of the parent are not here
        try:
            export(step, to, how, nobody, Filesystem(Faults.parse(f"kill_at=write:{kill_at}")))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
@pytest.mark.parametrize("format", [wide("safetensors"), "huggingface", wide("torch")])
def test_killed_before_any_operation_the_old_export_or_the_new_one_is_there(tmp_path: Path, format: str) -> None:
    old = keep(tmp_path / "old", {"model/x": torch.zeros(8)}, cut="whole")
    new = keep(tmp_path / "new", {"model/x": torch.ones(8)}, cut="whole")
    to = tmp_path / "out" / "export"
    how = ExportSettings(format=format, overwrite=True)
    outcomes = []
    for kill_at in range(1, 100):
        shutil.rmtree(to.parent, ignore_errors=True)
        export(old, to, how, nobody)
        if not killed(new, to, how, kill_at):
            break
        if not to.exists():  # between the two names of a folder; the next one to come puts it back, whatever it does
            assert format == "huggingface"
            with rejects("C040", match="exists; nothing was changed"):
                export(new, to, ExportSettings(format=format), nobody)
        path = to / "model.safetensors" if to.is_dir() else to
        found = torch.load(path, weights_only=True) if format == "torch" else load_file(path)
        assert found["x"].unique().numel() == 1
        outcomes.append(float(found["x"][0]))
    assert len(outcomes) > 5
    assert outcomes == sorted(outcomes)  # the old one until some operation, the new one from there on
    assert outcomes[0] < outcomes[-1]
    export(new, to, how, nobody)
    assert [path.name for path in to.parent.iterdir()] == ["export"]  # and what was left is gone


@pytest.mark.parametrize("format", ["safetensors", "huggingface", "torch"])
def test_a_disk_that_is_full_is_said_in_one_line(tmp_path: Path, format: str) -> None:
    step = keep(tmp_path / "store", {"model/x": torch.zeros(8)}, cut="whole")
    for write in range(2, 100):
        disk = Filesystem(Faults.parse(f"disk_full_at=write:{write}"))
        try:
            export(step, tmp_path / "a", ExportSettings(format=format), nobody, disk)
        except RunFailed as error:
            if "is written, but" in (told := str(error)):  # the very last operation
                (tmp_path / "a").rename(tmp_path / "gone")
                break
            assert f"{tmp_path / 'a'} was not written: No space left on device" in told
            assert "fix: free disk space" in told
            assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert 5 < write < 50


SHORT_OF_FILES = """
import resource, sys
from pathlib import Path
from shoal.checkpoint.formats.export import ExportSettings, export
from shoal.checkpoint.storage.locate import find

step = find(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
export(step, Path(sys.argv[2]), ExportSettings(format="dcp"), lambda size: None)
"""


@pytest.mark.wide
def test_what_fails_in_the_hands_of_torch_is_told_alike(tmp_path: Path) -> None:
    """No file of the process may have more than 100 kB."""
    keep(tmp_path / "store", {"model/x": torch.zeros(100, 1000)}, cut="whole")
    words = [sys.executable, "-c", SHORT_OF_FILES, str(tmp_path / "store"), str(tmp_path / "a")]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert "shoal.errors.ShoalError" in ended.stderr
    assert "a was not written: File too large" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_too_little_room_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    size = shutil.disk_usage(tmp_path).free // 2**10 * 2**10 + 2**30
    piece = Piece("a.safetensors", "x", (0,), (size,))
    manifest = Manifest(
        step=1, tensors={"model/x": Entry("U8", (size,), (piece,))}, files={"a.safetensors": File(0, ())}
    )
    with rejects("C010", match=r"GB free, and [\d,.]+ GB are needed; nothing was written"):
        export(SavedStep(tmp_path, manifest), tmp_path / "a.safetensors", ExportSettings(), nobody)
    assert list(tmp_path.iterdir()) == []


# ---- in little memory -----------------------------------------------------------------------------------------------

SIZE = 135 * 2**20
ROOM = 116 * 2**20
"""Less than the largest tensor, of 120 MiB."""
WATCHED = """
import ctypes, gc, json, os, sys, threading, time
from pathlib import Path
from shoal.checkpoint.formats import export, import_
from shoal.checkpoint.diff import compare
from shoal.checkpoint.storage.locate import find

def memory():  # that is not of a file: what the system cannot drop and read again
    resident, shared = open("/proc/self/statm").read().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")

def watch():
    global most
    while True:
        most = max(most, memory())
        time.sleep(0.004)

def nobody(size):
    pass

def out(format, source="store"):
    how = export.ExportSettings(format=format, shard_bytes=5e7)
    export.export(find(root / source), root / f"{format}-{source}", how, nobody)

def back(format):
    how = import_.ImportSettings(format=format, file_bytes=2**25)
    import_.import_checkpoint(import_.read(root / f"{format}-store", how), root / f"{format}-back", how, nobody)

def same(one="store", other="store"):
    assert compare(find(root / one), find(root / other), weights_only=False, progress=nobody).is_equal

root = Path(sys.argv[1])
ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed goes back at once, and is not counted
for format in export.FORMATS:
    out(format, "small")  # loads what is loaded once
most = 0
threading.Thread(target=watch, daemon=True).start()
found = {}
for act in sys.argv[2:]:
    name, *rest = act.split()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else what the act before has freed is used again, and nothing seems to be taken
    most = before = memory()
    {"export": out, "import": back, "diff": same}[name](*rest)
    found[act] = max(most, memory()) - before
for format in ("safetensors", "dcp"):
    same("store", f"{format}-back")
print(json.dumps(found))
"""
ACTS = [*(f"export {format}" for format in FORMATS), "import safetensors", "import dcp", "diff"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """135 MiB: one tensor of 120, and four of 3.75."""
    root = tmp_path_factory.mktemp("large")
    generator = torch.Generator().manual_seed(0)
    tensors = {"model/table": torch.randn(30 * 2**10, 2**10, generator=generator)}
    tensors |= {f"model/{i}": torch.randn(15 * 2**6, 2**10, generator=generator) for i in range(4)}
    keep(root / "store", tensors, cut="columns")
    keep(root / "small", {"model/x": torch.zeros(2)}, cut="whole")
    assert sum(tensor.nbytes for tensor in tensors.values()) == SIZE
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="module")
def most_memory(large: Path) -> dict[str, int]:
    """Act → bytes that were in use at once, beyond those before."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WATCHED, str(large), *ACTS]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, int] = json.loads(ended.stdout)
    return found


@pytest.mark.wide
@pytest.mark.parametrize("act", ACTS)
def test_memory_for_a_part_of_the_model_is_enough(large: Path, most_memory: dict[str, int], act: str) -> None:
    """Some rows at a time; an import holds one file of the checkpoint, here of 32 MiB."""
    assert 2**20 < most_memory[act] < ROOM
    if act.startswith("export"):
        to = large / f"{act.split()[1]}-store"
        assert sum(path.stat().st_size for path in ([to] if to.is_file() else to.iterdir())) >= SIZE


# ---- in -------------------------------------------------------------------------------------------------------------


def brought(source: Path, to: Path, **how: Any) -> SavedStep:
    asked = HowToImport(**how)
    import_checkpoint(read(source, asked), to, asked, nobody)
    return find(to)


def equal(one: SavedStep, other: SavedStep, *, weights_only: bool = False) -> Comparison:
    found = compare(one, other, weights_only=weights_only, progress=nobody)
    assert found.is_equal, found
    return found


@pytest.mark.parametrize("format", ["safetensors", "huggingface", "dcp"])
def test_what_went_out_comes_back(step: SavedStep, tmp_path: Path, format: str) -> None:
    to = tmp_path / ("a.safetensors" if format == "safetensors" else "a")
    has_states = format != "huggingface"
    export(step, to, ExportSettings(format=format, optimizer=has_states, shard_bytes=1e6), nobody)
    back = brought(to, tmp_path / "back", step=5)
    assert back.manifest.step == 5
    found = equal(step, back, weights_only=not has_states)
    assert found.num_equal == len(values()) + has_states
    assert back.manifest.state["scalars"] == ({"narrow": {"step": 12.0}} if has_states else {})


def test_a_dcp_folder_of_torch_comes_in(tmp_path: Path) -> None:
    """Nested, with what is no tensor in it, and with the names that a state dict of a module gives."""
    weights = {"a.weight": torch.randn(5, 3), "b": torch.randn(2).bfloat16()}
    state = {
        "model": weights,
        "optim": {"state": {"a.weight": {"exp_avg": torch.randn(5, 3), "step": torch.tensor(4.0)}}},
        "epoch": 3,
        "rng": torch.ones(4, dtype=torch.uint8),
    }
    with warnings.catch_warnings(action="ignore"):
        torch_checkpoint.save(state, checkpoint_id=tmp_path / "theirs")
    asked = HowToImport(prefix="model.")
    found = read(tmp_path / "theirs", asked)
    assert set(found.left_out) == {"epoch", "rng"}
    assert found.states.keys() == {("exp_avg", "a.weight"), ("step", "a.weight")}
    import_checkpoint(found, tmp_path / "ours", asked, nobody)
    wanted = {f"model/{name}": tensor for name, tensor in weights.items()}
    wanted["optimizer/exp_avg/a.weight"] = state["optim"]["state"]["a.weight"]["exp_avg"]  # type: ignore[index]
    equal(find(tmp_path / "ours"), keep(tmp_path / "wanted", wanted, cut="whole"))


def test_an_import_takes_a_directory_of_its_own(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    keep(tmp_path / "run", {"model/x": torch.zeros(2)}, cut="whole", step=100)
    with rejects("C040", "step-00000100"):
        brought(tmp_path / "a.safetensors", tmp_path / "run", overwrite=True)
    brought(tmp_path / "a.safetensors", tmp_path / "new")
    with rejects("C040", "step 0"):
        brought(tmp_path / "a.safetensors", tmp_path / "new")
    save_file({"x": torch.zeros(2)}, tmp_path / "b.safetensors")
    equal(find(tmp_path / "run"), brought(tmp_path / "b.safetensors", tmp_path / "new", overwrite=True))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is not in a format that can be imported"),
        (lambda path: torch.save({}, path), "is not in a format that can be imported"),
        (lambda path: keep(path, {"model/x": torch.zeros(2)}, cut="whole"), "has checkpoints of shoal"),
    ],
)
def test_what_cannot_be_imported_is_said(tmp_path: Path, make: Callable[[Path], None], told: str) -> None:
    make(tmp_path / "a")
    with pytest.raises(ShoalError, match=told):
        read(tmp_path / "a", HowToImport())
    for format in ("huggingface", "dcp"):
        with pytest.raises(ShoalError, match=r"does not exist|for --format"):
            read(tmp_path / "a", HowToImport(format=format))


# ---- a run ----------------------------------------------------------------------------------------------------------


def trained(folder: Path | None, load: Path | None, *, steps: int = 2) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of a run that loads, makes some steps and saves."""
    model = llama.build(**LLAMA)
    initialise(model, 1 if load else 0)
    losses = []
    with shoal.Run("fp64 mb=2", seed=0) as run:
        run.prepare(model)
        run.prepare(torch.optim.AdamW(run.parameters, lr=1e-2))
        if load:
            run.load(load)
        if folder and not steps:
            run.save(folder)
        for _ in range(steps):
            tokens = torch.randint(37, (8, 17), generator=torch.Generator().manual_seed(run.steps_done))
            batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
            losses.append(float(run.step(batch)))
        if folder and steps:
            run.save(folder)
        return {name: weight.clone() for name, weight in run.weights().items()}, losses


def test_a_run_goes_on_from_what_was_imported(tmp_path: Path) -> None:
    weights, _ = trained(tmp_path / "a", None)
    _, wanted = trained(None, tmp_path / "a")
    for format in ("safetensors", "dcp"):
        to = tmp_path / ("x.safetensors" if format == "safetensors" else "x")
        export(find(tmp_path / "a"), to, ExportSettings(format=format, optimizer=True), nobody)
        brought(to, tmp_path / f"{format}-back", step=2)
        _, losses = trained(None, tmp_path / f"{format}-back")
        assert [loss.hex() for loss in losses] == [loss.hex() for loss in wanted]
    # Without states the optimizer begins afresh, and the weights are what they were.
    section = {"name": "llama", **LLAMA}
    export(find(tmp_path / "a"), tmp_path / "hf", ExportSettings(format="huggingface", model=section), nobody)
    brought(tmp_path / "hf", tmp_path / "hf-back")
    ours, _ = trained(tmp_path / "b", tmp_path / "hf-back", steps=0)
    assert_all_same(ours, weights)
    assert trained(None, tmp_path / "hf-back")[1] != wanted


# ---- Hugging Face ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_the_configuration_of_a_llama_goes_over_and_back(tmp_path: Path, tied: bool) -> None:
    model = llama.build(**LLAMA, tied=tied)
    initialise(model, 0)
    weights = {f"model/{name}": value.detach() for name, value in model.named_parameters()}
    section = {"name": "llama", "preset": None, **LLAMA, "tied": tied, "rope_theta": 1e4, "norm_eps": 1e-6}
    step = keep(tmp_path / "store", weights, cut="columns", state={"recipe": {"model": section}})
    done = export(step, tmp_path / "hf", ExportSettings(format="huggingface"), nobody)
    assert done.config
    assert ("lm_head.weight" in load_file(tmp_path / "hf" / "model.safetensors")) is not tied
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["num_key_value_heads"], config["intermediate_size"], config["rms_norm_eps"]) == (2, 22, 1e-6)
    back = brought(tmp_path / "hf", tmp_path / "back")
    equal(step, back)
    rebuilt = {key: value for key, value in back.manifest.state["model"].items() if key != "name"}
    said = {key: value for key, value in section.items() if key not in ("name", "preset")}
    assert llama.build(**rebuilt).config == llama.build(**said, head_dim=4).config
    again = export(
        back, tmp_path / "again", ExportSettings(format="huggingface"), nobody
    )  # what an import has found is known
    assert again.config
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config


def test_transformers_computes_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = llama.build(**LLAMA)
    initialise(model, 0)
    weights = {f"model/{name}": value.detach() for name, value in model.named_parameters()}
    step = keep(tmp_path / "store", weights, cut="rows", state={"recipe": {"model": {"name": "llama", **LLAMA}}})
    export(step, tmp_path / "hf", ExportSettings(format="huggingface", shard_bytes=1e4), nobody)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.randint(37, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-5, atol=1e-6)


def test_the_recipe_of_another_model_is_refused(tmp_path: Path) -> None:
    model = llama.build(**LLAMA)
    initialise(model, 0)
    weights = {f"model/{name}": value.detach() for name, value in model.named_parameters()}
    step = keep(tmp_path / "store", weights, cut="whole")
    how = ExportSettings(format="huggingface", model={"name": "llama", **LLAMA, "num_layers": 3})
    with rejects("C044", "2 layers", "3 layers"):
        export(step, tmp_path / "hf", how, nobody)
    assert config_of({"name": "moe"}, {}) is None


@pytest.mark.parametrize(
    "other",
    [
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
    ],
)
def test_a_llama_that_ours_is_not_is_refused(other: dict[str, Any]) -> None:
    with rejects("C045"):
        model_of({"model_type": "llama", **other}, Path("config.json"))
    assert model_of({"model_type": "gpt2", **other}, Path("config.json")) is None


def test_what_config_json_leaves_out_is_what_huggingface_assumes() -> None:
    section = model_of(
        {"model_type": "llama", "num_attention_heads": 8, "rope_parameters": {"rope_theta": 7.0}}, Path()
    )
    assert section is not None
    assert (section["num_kv_heads"], section["vocabulary"], section["rope_theta"]) == (8, 32000, 7.0)
    assert "head_dim" not in section


# ---- hostile --------------------------------------------------------------------------------------------------------


class Hostile:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A sound folder of torch.distributed.checkpoint."""
    with warnings.catch_warnings(action="ignore"):
        torch_checkpoint.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "theirs")
    assert read(tmp_path / "theirs", HowToImport()).model["x"].boxes[0].read().sum() == 3
    return tmp_path / "theirs"


def test_a_metadata_that_runs_a_command_runs_nothing(theirs: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((theirs / ".metadata").read_bytes())
    metadata.planner_data = Hostile(f"touch {tmp_path / 'ran'}")
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with rejects("C036", "posix.system"):
        read(theirs, HowToImport())
    assert not (tmp_path / "ran").exists()
    pickle.loads((theirs / ".metadata").read_bytes())  # as torch does it
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "names",
    [
        ("builtins", "eval"), ("builtins", "getattr"), ("torch", "load"), ("torch._C", "_jit"), ("os", "system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"), ("pathlib", "os.system"),
        ("torch.serialization", "load"), ("functools", "partial"), ("copyreg", "_reconstructor"),
    ],
)  # fmt: skip
def test_no_other_name_is_looked_up(theirs: Path, names: tuple[str, str]) -> None:
    module, name = (text.encode() for text in names)
    text = b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(name)]) + name + b"\x93."
    (theirs / ".metadata").write_bytes(text)
    with rejects("C036", match="nothing was run"):
        read(theirs, HowToImport())


@pytest.mark.parametrize(
    "text",
    [
        b"", b"\x80\x04.", b"\x80\x04N.", b"\x80\x04]r\xff\xff\xff\x7f.", b"\x80\x04\x82\x01.", b"\x80\x04}." * 100,
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc.", b"cos\nsystem\n(S'ls'\ntR.", b"(" * 10000,
        b"\x80\x04X\xff",
    ],
)  # fmt: skip
def test_what_is_no_metadata_is_refused_in_little_memory(theirs: Path, text: bytes) -> None:
    (theirs / ".metadata").write_bytes(text)
    with pytest.raises(ShoalError, match=r"\.metadata"):
        read(theirs, HowToImport())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"relative_path": "../../etc/passwd"}, "into a file"),
        ({"relative_path": "/etc/passwd"}, "into a file"),
        ({"offset": -1}, "at -1 of"),
        ({"length": 10}, "has no tensor"),
        ({"offset": 5}, "has no tensor"),
        ({"transform_descriptors": ["zstd"]}, "compressed or encrypted"),
    ],
)
def test_a_place_that_cannot_be_is_refused(theirs: Path, change: dict[str, Any], told: str) -> None:
    metadata = pickle.loads((theirs / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        for key, value in change.items():
            setattr(info, key, value)
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ShoalError, match=told):
        read(theirs, HowToImport()).model["x"].boxes[0].read()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda entry: setattr(entry, "size", torch.Size([4])), "do not fill its shape"),
        (lambda entry: setattr(entry, "chunks", entry.chunks * 2), "do not fill its shape"),
        (lambda entry: setattr(entry, "size", torch.Size([2**40])), "do not fill its shape"),
        (lambda entry: setattr(entry.properties, "dtype", torch.complex64), "which shoal does not support"),
        (lambda entry: setattr(entry.properties, "dtype", torch.float16), "has something else"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(theirs: Path, change: Callable[[Any], None], told: str) -> None:
    metadata = pickle.loads((theirs / ".metadata").read_bytes())
    change(metadata.state_dict_metadata["x"])
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with rejects("C035", match=told):
        read(theirs, HowToImport()).model["x"].boxes[0].read()


def test_values_that_run_a_command_run_nothing(theirs: Path, tmp_path: Path) -> None:
    """torch.load refuses them, since only weights are asked for."""
    [file] = theirs.glob("*.distcp")
    torch.save(Hostile(f"touch {tmp_path / 'ran'}"), file)
    metadata = pickle.loads((theirs / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, file.stat().st_size
    (theirs / ".metadata").write_bytes(pickle.dumps(metadata))
    with rejects("C035", "'x'"):
        read(theirs, HowToImport()).model["x"].boxes[0].read()
    assert not (tmp_path / "ran").exists()


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "has a header of"),
        ((2**60).to_bytes(8, "little") + b"{}", "has a header of"),
        ((2).to_bytes(8, "little") + b"{x", "is not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((50000).to_bytes(8, "little") + b"[" * 50000, "is not JSON"),
        (header(x=3), "the dtype 'None'"),
        (header(x={"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}), "the dtype 'F99'"),
        (header(x={"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}), "the shape"),
        (header(x={"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}), "the shape"),
        (header(x={"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}), "puts the 4 bytes"),
        (header(x={"dtype": "F32", "shape": [1], "data_offsets": [16, 20]}), "is cut off: 'x' ends at byte"),
        (header(x={"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}), "puts the 8 bytes"),
        (header(x={"dtype": "F32", "shape": [99], "data_offsets": [0, 396]}), "is cut off: 'x' ends at byte"),
        (
            header(
                x={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                y={"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            ),
            "that overlap others",
        ),
    ],
)
def test_a_safetensors_file_that_cannot_be_is_refused(tmp_path: Path, data: bytes, told: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)
    with rejects("C049", match=told):
        safetensors.read(tmp_path / "a.safetensors")


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "b/../../a.safetensors", ""])
def test_an_index_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with rejects("C041", match="names a file"):
        read(folder, HowToImport(format="safetensors"))


# ---- what differs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_two_layouts_hold_the_same(tmp_path: Path, cut: str) -> None:
    tensors, state = model_and_states()
    one = keep(tmp_path / "a", tensors, cut="whole", state=state)
    other = keep(tmp_path / "b", tensors, cut=cut, state={**state, "seed": 8})
    found = equal(one, other)
    assert found.num_equal == len(tensors)
    assert found.state == (("seed", 7, 8),)


def test_what_differs_is_told_by_how_much(tmp_path: Path) -> None:
    tensors, _ = model_and_states()
    tensors["model/nan"] = torch.tensor([1.0, float("nan"), float("inf")])
    one = keep(tmp_path / "a", {**tensors, "model/gone": torch.ones(2)}, cut="columns")
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["model/large"][2099, 159] += 0.5
    changed["model/count"][0] += 1  # which float64 does not tell apart
    changed["model/narrow"] = changed["model/narrow"].float()
    changed["model/eight"] = torch.zeros(4, 16)
    changed["model/flags"][1] = True
    changed["model/nan"][0] = float("nan")
    other = keep(tmp_path / "b", {**changed, "model/new": torch.ones(2)}, cut="rows")
    found = compare(one, other, weights_only=True, progress=nobody)
    assert not found.is_equal
    assert found.only == (("model/gone",), ("model/new",))
    by_name = {difference.name: difference for difference in found.differences}
    assert [d.name for d in found.differences][:2] == ["model/eight", "model/nan"]
    assert by_name.keys() == {f"model/{name}" for name in ("large", "count", "narrow", "eight", "flags", "nan")}
    assert by_name["model/eight"].num_different is None
    large = by_name["model/large"]
    assert (large.num_different, large.max_abs) == (1, pytest.approx(0.5, abs=1e-6))
    norm = max(float(x["model/large"].double().norm()) for x in (tensors, changed))
    assert large.relative == pytest.approx(0.5 / norm, rel=1e-5)
    assert by_name["model/count"].num_different == 1
    assert by_name["model/narrow"].num_different == 0  # another dtype, the same values
    assert by_name["model/nan"].num_nans == (1, 2)
    assert by_name["model/nan"].num_different == 1


def test_a_module_takes_the_exported_file(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    state = {f"model/{name}": value for name, value in module.state_dict().items()}
    export(keep(tmp_path / "store", state, cut="rows"), tmp_path / "a.safetensors", ExportSettings(), nobody)
    other = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    other.load_state_dict(load_file(tmp_path / "a.safetensors"))
    assert_all_same(dict(other.state_dict()), dict(module.state_dict()))


def test_names_of_states_are_those_of_torch() -> None:
    assert dcp.state_of_name(dcp.name_of_state("exp_avg", "layers.0.weight")) == ("exp_avg", "layers.0.weight")
    assert dcp.state_of_name("model.layers.0.weight") is None
