"""Export a step: to one safetensors file, a Hugging Face folder, a folder of torch.distributed.checkpoint, a state dict
of torch, or a folder of PEFT or DeepSpeed.

Every value is checked when it is read, and only a box of one tensor is in memory. The output has the name of a draft
until all of it is on the disk: a process that dies before leaves nothing under the requested name.
"""

from __future__ import annotations

import errno
import mmap
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.formats import adapter, dcp, huggingface, safetensors, torch_file
from shoal.checkpoint.formats.deepspeed import write as deepspeed
from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.checkpoint.full_tensor import FullTensors
from shoal.checkpoint.state.base_fingerprint import BASE
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.locate import SavedStep
from shoal.checkpoint.storage.manifest import SIZES
from shoal.checkpoint.storage.shard_file import DTYPES
from shoal.errors import RunFailed, ShoalError

FORMATS = ("safetensors", "huggingface", "dcp", "torch", "deepspeed")
"""Formats of a whole model. `peft` is that of adapters."""
_OF_AN_EXPORT = (
    adapter.WEIGHTS,
    adapter.CONFIG,
    "model*.safetensors",
    huggingface.INDEX,
    huggingface.CONFIG,
    *huggingface.COPIED,
    dcp.METADATA,
    "*.distcp",
    "latest",
    "latest_universal",
    "global_step*",
)
"""Patterns of the files in a folder that an export writes."""


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """What to export, and in which format."""

    format: str = "safetensors"
    optimizer: bool = False
    """Also export the optimizer's state."""
    shard_bytes: float = 5e9
    """Maximum bytes of one file, in a Hugging Face folder."""
    overwrite: bool = False
    model: Mapping[str, Any] | None = None
    """The model section of a recipe; None: from the checkpoint."""
    num_steps: int = 0
    """Steps that the weights have made."""
    rates: tuple[Mapping[str, float], ...] = ()
    """The learning rates of the groups of parameters, as the step has them."""


@dataclass(frozen=True)
class Exported:
    """The files of an export."""

    tensors: int
    num_bytes: int
    config: bool
    """Whether there is a config.json."""


def export(
    step: SavedStep, to: Path, how: ExportSettings, progress: Callable[[int], None], disk: Filesystem | None = None
) -> Exported:
    """Write a step to a new file or folder; `progress` is called with the bytes of each part."""
    if how.optimizer and how.format == "huggingface":
        raise ShoalError(
            "--format huggingface has weights alone, and cannot be combined with --optimizer",
            fix="--format dcp",
            code="R044",
        )
    how = replace(how, num_steps=step.manifest.step, rates=_rates_in(step))
    with FullTensors(step) as full:
        tensors = _named(full, how)
        extra = huggingface.Extra()
        if how.format == "huggingface":
            _reject_adapters_alone(step)
            tensors, extra = huggingface.for_export(how.model or model_in(step), tensors)
        elif how.format == "peft":
            extra = huggingface.Extra(_adapter_config(step))
        states = full.optimizer() if how.optimizer and how.format == "deepspeed" else {}
        return write_tensors(tensors, to, how, extra, progress, disk, states)


def write_tensors(
    tensors: Mapping[str, LazyTensor],
    to: Path,
    how: ExportSettings,
    extra: huggingface.Extra,
    progress: Callable[[int], None],
    disk: Filesystem | None = None,
    states: deepspeed.States = MappingProxyType({}),
) -> Exported:
    """Write tensors to a new file or folder; `extra` is what a folder has beside them, and `states` are those of the
    optimizer where they have files of their own."""
    disk = disk or Filesystem()
    size = sum(tensor.num_bytes for tensor in (*tensors.values(), *states.values()))
    needs = size * (2 if how.format == "torch" else 1)
    if how.format == "deepspeed":
        weights = sum(tensor.num_bytes for tensor in tensors.values())
        needs = weights + max(weights, deepspeed.num_bytes(tensors, states))
    with _target(to, disk, overwrite=how.overwrite, needs=needs) as draft:
        if how.format == "deepspeed":
            _write_deepspeed(draft, tensors, states, how, progress, disk)
        else:
            _write(draft, tensors, how, extra, progress, disk)
    return Exported(len(tensors) + len(states), size, extra.config is not None)


def _write_deepspeed(
    draft: Path,
    tensors: Mapping[str, LazyTensor],
    states: deepspeed.States,
    how: ExportSettings,
    progress: Callable[[int], None],
    disk: Filesystem,
) -> None:
    inner = draft / f"global_step{how.num_steps}"
    disk.make_draft(draft)
    disk.make(inner)
    form = partial(deepspeed.as_model_file, num_steps=how.num_steps)
    _write_state_dict(inner / deepspeed.MODEL, tensors, progress, disk, form)
    deepspeed.write_beside(inner, how.num_steps, disk)
    deepspeed.write_universal(inner, tensors, states, how.rates, progress=progress, disk=disk)
    disk.sync(inner)
    disk.sync(draft)


def _reject_adapters_alone(step: SavedStep) -> None:
    if BASE in step.manifest.state:
        raise ShoalError(
            f"{step.path} must hold a whole model for --format huggingface, got adapters alone",
            fix="--format peft for the adapters; or shoal checkpoint merge RUN TO for the base with its updates",
            code="L014",
        )


def _adapter_config(step: SavedStep) -> dict[str, Any]:
    settings = step.manifest.state.get("lora")
    if not isinstance(settings, dict):
        raise ShoalError(
            f"{step.path} must hold adapters for --format peft, got none", fix="--format safetensors", code="L014"
        )
    if others := settings.get("others"):
        first = str(others[0])[:80]
        raise ShoalError(
            f"--format peft has adapters and whole modules, and {step.path} has {len(others)} other trained parameters,"
            f" such as {first}, which would be lost",
            fix=f"--format safetensors; or modules_to_save=[{first.rpartition('.')[0]!r}] when the run begins",
            code="L024",
        )
    name = model_in(step).get("name")
    return adapter.config_of(settings, base=name.removeprefix("hf:") if isinstance(name, str) else None)


def model_in(step: SavedStep) -> Mapping[str, Any]:
    """Return the model section of the recipe of a step, or what an import has found; empty: unknown."""
    state = step.manifest.state
    recipe = state.get("recipe")
    found = recipe.get("model") if isinstance(recipe, dict) else state.get("model")
    return found if isinstance(found, dict) else {}


def _rates_in(step: SavedStep) -> tuple[Mapping[str, float], ...]:
    found = step.manifest.state.get("lr")
    groups = found if isinstance(found, list) else []
    return tuple(group for group in groups if isinstance(group, dict) and isinstance(group.get("lr"), int | float))


def _named(full: FullTensors, how: ExportSettings) -> dict[str, LazyTensor]:
    tensors = full.model()
    if not tensors:
        raise ShoalError(
            f"{full.step.path} must have tensors of a model, got none", fix="export another checkpoint", code="C037"
        )
    if how.optimizer and how.format != "deepspeed":
        for (kind, parameter), state in full.optimizer().items():
            name = dcp.name_of_state(kind, parameter) if how.format == "dcp" else f"optimizer/{kind}/{parameter}"
            tensors[name] = state
    return tensors


def _write(
    draft: Path,
    tensors: Mapping[str, LazyTensor],
    how: ExportSettings,
    extra: huggingface.Extra,
    progress: Callable[[int], None],
    disk: Filesystem,
) -> None:
    if how.format == "safetensors":
        safetensors.write(draft, tensors, disk, progress, format="pt")
    elif how.format == "torch":
        _write_state_dict(draft, tensors, progress, disk)
    else:
        disk.make_draft(draft)
        if how.format == "huggingface":
            huggingface.write(draft, tensors, disk, progress, shard_bytes=how.shard_bytes, extra=extra)
        elif how.format == "peft":
            assert extra.config is not None
            adapter.write(draft, tensors, disk, progress, config=extra.config)
        else:
            dcp.write(draft, tensors, progress)
            for name in disk.names(draft):
                disk.sync(draft / name)
        disk.sync(draft)


def _write_state_dict(
    draft: Path,
    tensors: Mapping[str, LazyTensor],
    progress: Callable[[int], None],
    disk: Filesystem,
    form: Callable[[dict[str, Tensor]], dict[str, Any]] = dict,
) -> None:
    """Write with torch.save, which needs all tensors at once. So they are written to a file first, and then mapped from
    it, which the system reads as torch proceeds."""
    values = _beside(draft)
    places = safetensors.write(values, tensors, disk, progress)
    with values.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)  # unmapped when the last tensor is freed
    state = form({name: _view(memory, *places[name]) for name in tensors})
    torch_file.save(draft, state, disk)
    disk.remove(values)


def _view(memory: mmap.mmap, dtype: str, shape: tuple[int, ...], begin: int, end: int) -> Tensor:
    if begin == end:
        return torch.empty(shape, dtype=DTYPES[dtype])
    assert end - begin == prod(shape) * SIZES[dtype]
    return torch.frombuffer(memory, dtype=DTYPES[dtype], count=prod(shape), offset=begin).view(shape)


# ---- complete, or not at all ----------------------------------------------------------------------------------------


@contextmanager
def _target(to: Path, disk: Filesystem, *, overwrite: bool, needs: int) -> Iterator[Path]:
    """Yield the path of a draft; it becomes `to` when all of it is on the disk."""
    draft, gone = to.with_name(f".draft-{to.name}"), to.with_name(f".draft-gone-{to.name}")
    try:
        if gone.exists() and not to.exists():
            disk.rename(gone, to)  # a process was killed between removing the old one and renaming the new one
        _reject_existing(to, overwrite)
        disk.make(to.parent)
        for left in (draft, _beside(draft), gone):
            if left.exists():
                disk.remove(left)
        reject_full_disk(to.parent, needs)
        try:
            yield draft
            if to.exists() and (to.is_dir() or draft.is_dir()):  # only a file replaces a file atomically
                disk.rename(to, gone)
            disk.rename(draft, to)
            _sync(to, disk)
            if gone.exists():
                disk.remove(gone)
        finally:
            for left in (draft, _beside(draft)):
                if left.exists():
                    disk.remove(left)
    except OSError as error:
        raise failed(to, error) from error


def _sync(to: Path, disk: Filesystem) -> None:
    try:
        disk.sync(to.parent)
    except OSError as error:
        raise RunFailed(
            f"{to} is written, but the disk has not confirmed it: {error.strerror}",
            fix=f"df -h {to.parent}, and then the same command with --overwrite",
            code="C038",
        ) from error


def _beside(draft: Path) -> Path:
    return draft.with_name(f"{draft.name}.values")


def _reject_existing(to: Path, overwrite: bool) -> None:
    if not to.name:
        raise ShoalError(f"{str(to)!r} is not a name for a new file or folder", fix="a new name", code="C039")
    reject_path_inside_file(to)
    if not to.exists() and not to.is_symlink():
        return
    if not overwrite:
        raise ShoalError(f"{to} exists; nothing was changed", fix="another name, or --overwrite", code="C040")
    others = [path.name for path in (to.iterdir() if to.is_dir() else ()) if not any(map(path.match, _OF_AN_EXPORT))]
    if others:
        raise ShoalError(
            f"{to} has {', '.join(sorted(others)[:3])}, which no export has written; nothing was changed",
            fix="another name, or remove it yourself",
            code="C040",
        )


def reject_path_inside_file(to: Path) -> None:
    """Reject a path below a file."""
    above = next((parent for parent in to.parents if parent.is_file()), None)
    if above is not None:
        raise ShoalError(f"{to} must be in a directory, got the file {above}", fix="a path in a directory", code="C039")


def reject_full_disk(folder: Path, needs: int) -> None:
    """Raise if an existing folder has less free space than will be written."""
    free = shutil.disk_usage(folder).free
    if needs > free:
        raise ShoalError(
            f"{folder} has {free / 1e9:,.2f} GB free, and {needs / 1e9:,.2f} GB are needed; nothing was written",
            fix="free disk space, or write to another disk",
            code="C010",
        )


def failed(to: Path, error: OSError) -> ShoalError:
    """Describe a failed write in one message."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    kind = RunFailed if is_full or error.errno == errno.EIO else ShoalError
    where = f" ({error.filename})" if error.filename else ""
    return kind(
        f"{to} was not written: {error.strerror}{where}; the previous content is unchanged",
        fix="free disk space, or write to another disk" if is_full else "a path that you can write to",
        code="C009",
    )
