"""Checkpoints of an engine: shoal's own format below `DIRECTORY/TAG`, and DeepSpeed's file `latest`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.checkpoint.formats.deepspeed.zero import step_folder
from shoal.comm.all_or_none import on_main
from shoal.errors import ShoalError
from shoal.files import read_regular, write_text

if TYPE_CHECKING:
    from shoal.deepspeed.engine import Engine

LONGEST_TAG = 200
OF_ENGINE, OF_CLIENT = "engine", "client"
"""Entries of what is saved beside a run."""


def save(engine: Engine, folder: Path, tag: str | None, client: Mapping[str, Any], *, save_latest: bool) -> None:
    """Save all of an engine between two steps."""
    name = _checked(f"global_step{engine.global_steps}" if tag is None else str(tag))
    counters = {"skipped_steps": engine.skipped_steps, "global_samples": engine.global_samples}
    engine.run.save(folder / name, keep=1, extra={OF_ENGINE: counters, OF_CLIENT: dict(client)})
    if save_latest and engine.run.is_main:
        beside = folder / f".latest.{os.getpid()}"
        write_text(beside, name)
        beside.replace(folder / "latest")  # whole or not at all


def load(
    engine: Engine, folder: Path, tag: str | None, *, load_module_only: bool, others: Mapping[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """Load an engine; (None, {}): there is no tag, as DeepSpeed has it."""
    _reject_parts(others)
    if tag is None:
        tag = on_main(engine.run.world, lambda: _latest(folder), failed=f"{folder / 'latest'} was not read")
    if tag is None:
        warnings.warn(f"there is no file {folder / 'latest'}: nothing is loaded", stacklevel=3)
        return None, {}
    place = folder / _checked(str(tag))
    _reject_foreign(place)
    engine.run.load(place, only_weights=load_module_only)
    if load_module_only:
        return str(place), {}
    saved = engine.run.extra
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()  # which may have changed
    counters = saved.get(OF_ENGINE, {})
    engine.skipped_steps = int(counters.get("skipped_steps", 0))
    engine.global_samples = int(counters.get("global_samples", engine.global_steps * engine.train_batch_size()))
    return str(place), dict(saved.get(OF_CLIENT, {}))


def whole_weights(engine: Engine, *, without_frozen: bool) -> dict[str, Tensor] | None:
    """All weights in the precision of the run, on rank 0; None on the others."""
    weights = engine.run.weights()
    if not engine.run.is_main:
        return None
    dtype, left_out = engine.run.precision.compute_dtype, frozen_names(engine) if without_frozen else set()
    found = {name: one for name, one in weights.items() if name not in left_out}
    return {name: one.to(dtype) if one.is_floating_point() else one for name, one in found.items()}


def frozen_names(engine: Engine) -> set[str]:
    """The names of parameters without a gradient."""
    return {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}


def write_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Write weights as `torch.save` does, which DeepSpeed's scripts read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(weights, path)


def _latest(folder: Path) -> str | None:
    """The tag that was saved last; None: there is none."""
    try:
        return read_regular(folder / "latest", LONGEST_TAG).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def _checked(tag: str) -> str:
    """A tag is the name of one folder."""
    if not tag.strip() or "/" in tag or tag in (".", "..") or len(tag) > LONGEST_TAG or not tag.isprintable():
        raise ShoalError(
            f"a tag must be the name of one folder, got {tag[:80]!r}", fix='tag="global_step100"', code="E016"
        )
    return tag


def _reject_foreign(place: Path) -> None:
    """A checkpoint that DeepSpeed has saved."""
    if place.is_dir() and step_folder(place) is not None:
        raise ShoalError(
            f"{place} was saved by DeepSpeed",
            fix=f'shoal checkpoint import {place} ours, and engine.run.load("ours")',
            code="E016",
        )


def _reject_parts(others: Mapping[str, Any]) -> None:
    """Arguments of DeepSpeed that would load a part of a checkpoint."""
    usual = {
        "load_module_strict": True,
        "load_optimizer_states": True,
        "load_lr_scheduler_states": True,
        "custom_load_fn": None,
    }
    for name, value in others.items():
        if name not in usual or value != usual[name]:
            what = f"load_checkpoint({name}={value!r}) is not supported"
            raise ShoalError(what, fix="load_module_only=True for the weights alone; or all of it", code="E016")
