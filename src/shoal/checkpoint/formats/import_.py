"""Import a checkpoint: safetensors, or a folder of Hugging Face, torch.distributed.checkpoint, DeepSpeed or Megatron.

Tensors are read box by box and written to files of bounded size, a larger tensor in several pieces. The result is an
ordinary checkpoint: with hashes, complete or absent, and loadable on any layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from shoal.checkpoint.formats import dcp, huggingface, safetensors
from shoal.checkpoint.formats.deepspeed.read import read_deepspeed
from shoal.checkpoint.formats.deepspeed.zero import num_steps, step_folder
from shoal.checkpoint.formats.export import failed, reject_full_disk, reject_path_inside_file
from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.checkpoint.formats.megatron.common import is_megatron
from shoal.checkpoint.formats.megatron.read import read_megatron
from shoal.checkpoint.save import key_of
from shoal.checkpoint.storage import shard_file
from shoal.checkpoint.storage.locate import find
from shoal.checkpoint.storage.manifest import NAME, Entry, File, Manifest, Piece, Shape
from shoal.checkpoint.storage.store import Store
from shoal.errors import ShoalError, listed

FORMATS = ("auto", "safetensors", "huggingface", "dcp", "deepspeed", "megatron")
FILE_BYTES = 256 * 2**20
"""Maximum bytes of one file of the checkpoint, which is in memory while it is written; a larger box has its own."""


@dataclass(frozen=True, kw_only=True)
class ImportSettings:
    """What to import, and as what."""

    format: str = "auto"
    step: int | None = None
    """The step of the checkpoint. None: that of the source, or 0 if it has none."""
    prefix: str = ""
    """The prefix of the names of weights; other tensors are left out."""
    vocabulary: int | None = None
    """The size of the vocabulary, of which Megatron's files have padding; None: the padding stays."""
    overwrite: bool = False
    file_bytes: int = FILE_BYTES
    """Maximum bytes of one file of the checkpoint."""


@dataclass(frozen=True)
class Foreign:
    """The content of a foreign checkpoint."""

    source: str
    """The name of the file or folder."""
    format: str
    model: dict[str, LazyTensor]
    """Name of a parameter → its values."""
    states: dict[tuple[str, str], LazyTensor] = field(default_factory=dict)
    """(State, name of a parameter) → the optimizer's state."""
    left_out: tuple[str, ...] = ()
    num_steps: int = 0
    """The steps that the source has made, as far as it says so."""
    section: dict[str, Any] | None = None
    """The model section of a recipe that these weights fit."""

    def step(self, how: ImportSettings) -> int:
        """The step to import it as."""
        return self.num_steps if how.step is None else how.step

    @property
    def num_bytes(self) -> int:
        """Bytes that will be written."""
        return sum(tensor.num_bytes for tensor in (*self.model.values(), *self.states.values()))


def import_checkpoint(found: Foreign, to: Path, how: ImportSettings, progress: Callable[[int], None]) -> Path:
    """Write a checkpoint; return its step. `progress` is called with the bytes of each part."""
    store, step = Store(to), found.step(how)
    _reject_existing(store, step, overwrite=how.overwrite)
    try:
        draft = store.begin(step)
        reject_full_disk(to, found.num_bytes)
        manifest = _write(draft, store, found, how, progress)
        Manifest.parse(manifest.to_bytes())  # whatever was read, the result can be loaded
        return store.commit(manifest)
    except BaseException as error:
        store.abandon(step)
        if isinstance(error, OSError):
            raise failed(to, error) from error
        raise


def _reject_existing(store: Store, step: int, *, overwrite: bool) -> None:
    root = store.root
    reject_path_inside_file(root)
    if root.exists() and not root.is_dir():
        raise ShoalError(f"a checkpoint must be a directory, got the file {root}", fix="a new directory", code="C003")
    there = {path.name for path in root.iterdir() if not path.name.startswith(".draft-")} if root.is_dir() else set()
    if not there:
        return
    own = {store.path(step).name, "latest"}
    if step not in store.steps() or not there <= own:
        raise ShoalError(
            f"{root} has {', '.join(sorted(there - own)[:3] or sorted(there))}; nothing was changed",
            fix="import into a new directory",
            code="C040",
        )
    if not overwrite:
        raise ShoalError(
            f"{root} has step {step} already; nothing was changed", fix="another name, or --overwrite", code="C040"
        )


# ---- reading --------------------------------------------------------------------------------------------------------


def read(source: Path, how: ImportSettings) -> Foreign:
    """Read a foreign checkpoint."""
    kind = detect(source) if how.format == "auto" else how.format
    if how.vocabulary is not None and kind != "megatron":
        raise ShoalError(f"--vocabulary is of --format megatron, got {kind}", fix="leave --vocabulary out", code="C042")
    if kind == "deepspeed":
        return _deepspeed(source, how.prefix)
    if kind == "megatron":
        return _megatron(source, how)
    section = None
    others: list[str] = []
    if kind == "dcp":
        tensors, others = dcp.read(_folder(source, "dcp", dcp.METADATA))
    elif kind == "huggingface":
        folder = _folder(source, "huggingface", huggingface.CONFIG)
        tensors = huggingface.read(folder)
        section = huggingface.model_of(huggingface.read_json(folder / huggingface.CONFIG), folder / huggingface.CONFIG)
        if section is not None:
            tensors = huggingface.without_copies(tensors, section)
    else:
        _reject_missing(source)
        tensors = huggingface.read(source) if source.is_dir() else safetensors.read(source)
    return _sorted_out(Foreign(source.name, kind, {}, left_out=tuple(others), section=section), tensors, how.prefix)


def _deepspeed(source: Path, prefix: str) -> Foreign:
    """Read a checkpoint of DeepSpeed."""
    _reject_missing(source)
    folder = step_folder(source)
    if folder is None:
        raise ShoalError(
            f"{source} has no checkpoint of DeepSpeed: neither mp_rank_00_model_states.pt, nor a file latest, nor"
            " zero/",
            fix="the folder that was given to save_checkpoint, or a tag in it",
            code="E020",
        )
    tensors, states, others = read_deepspeed(folder)
    named = {**tensors, **{f"optimizer/{kind}/{name}": tensor for (kind, name), tensor in states.items()}}
    found = Foreign(source.name, "deepspeed", {}, left_out=tuple(others), num_steps=num_steps(folder) or 0)
    return _sorted_out(found, named, prefix)


def _megatron(source: Path, how: ImportSettings) -> Foreign:
    """Read a checkpoint of Megatron-LM."""
    _reject_missing(source)
    if how.prefix:
        raise ShoalError(
            f"--prefix is of other formats than megatron, got {how.prefix!r}",
            fix=f"leave --prefix out; or --format dcp --prefix {how.prefix}",
            code="C042",
        )
    found = read_megatron(source, vocabulary=how.vocabulary)
    return Foreign(
        source.name, "megatron", found.weights, found.states, found.left_out, found.num_steps, found.section
    )  # fmt: skip


def detect(source: Path) -> str:
    """Detect the format of a file or folder by its names."""
    _reject_missing(source)
    if source.is_dir():
        if is_megatron(source):
            return "megatron"
        if (source / dcp.METADATA).is_file():
            return "dcp"
        if step_folder(source) is not None:
            return "deepspeed"
        if any(source.glob("*.safetensors")) and not (source / NAME).is_file():
            return "huggingface" if (source / huggingface.CONFIG).is_file() else "safetensors"
        _reject_own_format(source)
    elif source.suffix == ".safetensors":
        return "safetensors"
    raise ShoalError(
        f"{source} is not in a format that can be imported",
        fix=f"a .safetensors file, a folder of them, a folder with {dcp.METADATA}, or one of DeepSpeed or"
        " Megatron-LM; --format says which. A .pt or .bin file: save it as safetensors first,"
        " safetensors.torch.save_file(torch.load(..., weights_only=True), ...)",
        code="C046",
    )


def _reject_missing(source: Path) -> None:
    if not source.exists():
        raise ShoalError(f"{source} does not exist", fix=f"ls {source.parent}", code="C004")


def _reject_own_format(source: Path) -> None:
    """Reject a checkpoint of shoal's, which needs no import."""
    try:
        step = find(source)
    except ShoalError:
        return
    raise ShoalError(
        f"{source} has checkpoints of shoal, such as {step.path.name}",
        fix="load it without an import: run.load(...)",
        code="C047",
    )


def _folder(source: Path, kind: str, needs: str) -> Path:
    _reject_missing(source)
    if not (source / needs).is_file():
        others = [name for name in FORMATS[1:] if name != kind]
        raise ShoalError(
            f"{source} must have {needs} for --format {kind}, got none",
            fix=f"--format {listed(others)}, or another folder",
            code="C042",
        )
    return source


def _sorted_out(found: Foreign, tensors: Mapping[str, LazyTensor], prefix: str) -> Foreign:
    """Separate weights, states of weights that exist, and the rest."""
    model: dict[str, LazyTensor] = {}
    states: dict[str, tuple[str, str]] = {}
    left_out = list(found.left_out)
    for name, tensor in tensors.items():
        state = dcp.state_of_name(name) if found.format == "dcp" else _state_of_name(name)
        if state is not None:
            states[name] = state
        elif name.startswith(prefix):
            model[name.removeprefix(prefix)] = tensor
        else:
            left_out.append(name)
    if not model:
        raise ShoalError(
            f"none of the {len(tensors)} tensors is a weight" + (f" called {prefix}..." if prefix else ""),
            fix=f"--prefix PREFIX, the start of the names: {', '.join(list(tensors)[:3]) or 'there are none'}",
            code="C048",
        )
    fitting: dict[tuple[str, str], LazyTensor] = {}
    for name, (kind, parameter) in states.items():
        known = parameter if parameter in model else parameter.removeprefix(prefix)
        if known in model and tensors[name].shape in ((), model[known].shape):
            fitting[kind, known] = tensors[name]
        else:
            left_out.append(name)
    return replace(found, model=model, states=fitting, left_out=tuple(left_out))


def _state_of_name(name: str) -> tuple[str, str] | None:
    """Return kind and parameter of a state that `shoal checkpoint export --optimizer` wrote; None: it is not a
    state."""
    parts = name.split("/", 2)
    return (parts[1], parts[2]) if parts[0] == "optimizer" and len(parts) == 3 else None


# ---- writing --------------------------------------------------------------------------------------------------------


def _write(draft: Path, store: Store, found: Foreign, how: ImportSettings, progress: Callable[[int], None]) -> Manifest:
    tensors = {f"model/{name}": tensor for name, tensor in found.model.items()}
    scalars: dict[str, dict[str, float]] = {}
    for (kind, parameter), tensor in found.states.items():
        if tensor.shape:
            tensors[f"optimizer/{kind}/{parameter}"] = tensor
        else:
            scalars.setdefault(parameter, {})[kind] = float(tensor.boxes[0].read())
    files: dict[str, File] = {}
    pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
    for number, group in enumerate(_groups(tensors, how.file_bytes)):
        file = f"shard-{number:05d}.safetensors"
        values: dict[str, Tensor] = {}
        for name, place in group:
            box = tensors[name].boxes[place]
            key = key_of(name, box.begin)
            pieces[name].append(Piece(file, key, box.begin, box.shape))
            values[key] = box.read()
            progress(values[key].numel() * values[key].element_size())
        files[file] = shard_file.write(draft / file, values, store.disk)
    entries = {name: Entry(tensor.dtype, tensor.shape, tuple(pieces[name])) for name, tensor in tensors.items()}
    state: dict[str, Any] = {"imported": {"from": found.source, "format": found.format}, "scalars": scalars}
    if found.section is not None:
        state["model"] = found.section
    return Manifest(step=found.step(how), tensors=entries, files=files, state=state)


def _groups(tensors: Mapping[str, LazyTensor], most_bytes: int) -> Iterator[list[tuple[str, int]]]:
    """Group boxes into files: names, and which box of each."""
    group: list[tuple[str, int]] = []
    size = 0
    for name, tensor in tensors.items():
        for place, box in enumerate(tensor.boxes):
            box_bytes = _num_bytes(tensor, box.shape)
            if group and size + box_bytes > most_bytes:
                yield group
                group, size = [], 0
            group.append((name, place))
            size += box_bytes
    if group:
        yield group


def _num_bytes(tensor: LazyTensor, shape: Shape) -> int:
    return LazyTensor(tensor.dtype, shape, ()).num_bytes
