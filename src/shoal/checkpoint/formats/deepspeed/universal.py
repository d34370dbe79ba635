"""Read a universal checkpoint of DeepSpeed: a folder for each parameter, with a file for each of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.formats.deepspeed.flat import Shapes, too_short
from shoal.checkpoint.formats.deepspeed.safe_load import safe_load
from shoal.checkpoint.formats.deepspeed.zero import States, Tensors
from shoal.checkpoint.formats.lazy_tensor import Box, LazyTensor, in_memory
from shoal.checkpoint.storage.manifest import Shape
from shoal.checkpoint.storage.shard_file import NAMES
from shoal.errors import ShoalError

FOLDER, WEIGHT = "zero", "fp32"


def is_universal(folder: Path) -> bool:
    """Whether a folder has parameters in folders of their own."""
    return (folder / FOLDER).is_dir()


def read_universal(folder: Path, shapes: Shapes, shared: Collection[str]) -> tuple[Tensors, States]:
    """Tensors by name, and states by kind and name. Those of stage 3 are flat: `shapes` has their shapes. `shared` are
    names that another one stands for."""
    tensors: Tensors = {}
    states: States = {}
    for path in sorted((folder / FOLDER).rglob("*.pt")):
        name, kind = path.parent.relative_to(folder / FOLDER).as_posix(), path.stem
        if name in shared:
            continue
        if kind == "step":
            value = _value(path)
            number = float(value) if isinstance(value, int | float | Tensor) else 0.0
            states["step", name] = in_memory("F32", torch.tensor(number))
        elif kind == WEIGHT:
            tensors[name] = _lazy(path, shapes.get(name))
        elif kind not in ("optimizer_state",):
            states[kind, name] = _lazy(path, shapes.get(name))
    common = _common_step(folder / FOLDER / "optimizer_state.pt")
    for name in {name for kind, name in states if kind != "step"} if common is not None else ():
        states.setdefault(("step", name), in_memory("F32", torch.tensor(common)))
    if not tensors:
        raise ShoalError(f"{folder / FOLDER} has no {WEIGHT}.pt", fix="another folder", code="E022")
    return tensors, states


def _common_step(path: Path) -> float | None:
    """The step of the optimizer, which stage 3 saves once; None: there is none."""
    found = safe_load(path) if path.is_file() else {}
    for key in ("optimizer_state_dict", "state", 0, "step"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return (
        float(found) if isinstance(found, int | float) or (isinstance(found, Tensor) and found.numel() == 1) else None
    )


def _lazy(path: Path, known: Sequence[int] | None) -> LazyTensor:
    value = _value(path)
    if not isinstance(value, Tensor) or value.dtype not in NAMES:
        raise ShoalError(f"{path} must hold a tensor, got a {type(value).__name__}", fix="another file", code="E023")
    shape: Shape = tuple(value.shape if known is None else known)
    if value.numel() != prod(shape):
        raise too_short(path.parent.name, prod(shape), value.numel())
    return LazyTensor(NAMES[value.dtype], shape, (Box((0,) * len(shape), shape, partial(_read, path, shape)),))


def _read(path: Path, shape: Shape) -> Tensor:
    value = _value(path)
    assert isinstance(value, Tensor)
    return value.reshape(shape).clone()  # of a mapped file


def _value(path: Path) -> Any:
    found = safe_load(path)
    return found.get("param", found) if isinstance(found, Mapping) else found
