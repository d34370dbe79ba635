"""Load a run, on any layout: every rank reads its own boxes out of the pieces that they overlap, and checks what it
reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.checkpoint.manifest import Entry, Manifest, Piece, Shape
from shoal.checkpoint.shard import DTYPES, Reader
from shoal.checkpoint.state import Held, held_by, make_states
from shoal.checkpoint.store import Store
from shoal.errors import Problem, ShoalError, raise_if
from shoal.parallel.composed import Composed


def load(store: Store, composed: Composed, optimizer: Optimizer, *, step: int | None = None) -> Manifest:
    """Fill a run with what was saved of a step; None: the newest. Returns its manifest."""
    steps = store.steps()
    if not steps:
        raise ShoalError(f"there is no checkpoint in {store.root}", fix="the directory that a run was saved to")
    manifest = store.manifest(steps[-1] if step is None else step)
    make_states(composed, optimizer, _kinds(manifest), dict(manifest.state.get("scalars", {})))
    held = list(held_by(composed, optimizer))
    raise_if(_misfits(manifest, held), title=f"step {manifest.step} of {store.root} is of another model")
    with _Files(store.path(manifest.step), manifest) as files, torch.no_grad():
        for piece in held:
            fill(piece, manifest.tensors[piece.name], files)
    return manifest


def fill(held: Held, entry: Entry, files: _Files) -> None:
    """A piece with what others have written of it."""
    for piece in entry.pieces:
        here, there = overlap(held.begin, tuple(held.value.shape), piece)
        if all(part.stop > part.start for part in here):
            held.value[here].copy_(_read(files, entry, piece, there))


def overlap(begin: Shape, shape: Shape, piece: Piece) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """What a box shares with a piece, as a part of the box and as a part of the piece.

    >>> overlap((2,), (4,), Piece("", "", (0,), (3,)))
    ((slice(0, 1, None),), (slice(2, 3, None),))
    """
    here, there = [], []
    for own, size, other, extent in zip(begin, shape, piece.begin, piece.shape, strict=True):
        first, last = max(own, other), max(max(own, other), min(own + size, other + extent))
        here.append(slice(first - own, last - own))
        there.append(slice(first - other, last - other))
    return tuple(here), tuple(there)


def _read(files: _Files, entry: Entry, piece: Piece, part: tuple[slice, ...]) -> Tensor:
    first = part[0] if part else slice(0, 1)
    rows = files[piece.file].rows(piece.key, entry.dtype, piece.shape, first.start, first.stop)
    return rows[(slice(None), *part[1:])] if part else rows


def _kinds(manifest: Manifest) -> dict[str, dict[str, torch.dtype]]:
    """Parameter → the states that there are of it."""
    found: dict[str, dict[str, torch.dtype]] = {}
    for name, entry in manifest.tensors.items():
        if name.startswith("optimizer/"):
            _, kind, parameter = name.split("/", 2)
            found.setdefault(parameter, {})[kind] = DTYPES[entry.dtype]
    return found


def _misfits(manifest: Manifest, held: list[Held]) -> Iterator[Problem]:
    for piece in held:
        entry = manifest.tensors.get(piece.name)
        if entry is None:
            yield Problem(f"it has no {piece.name}", "the model and the optimizer that were saved")
        elif entry.shape != piece.whole:
            what = f"{piece.name} has the shape {list(entry.shape)} there, and {list(piece.whole)} here"
            yield Problem(what, "the model that was saved")


class _Files(Mapping[str, Reader]):
    """The files of a step, each opened when it is first asked for."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._open: dict[str, Reader] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Reader:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(Reader(self.folder / name, self.manifest.files[name]))
        return self._open[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.files)

    def __len__(self) -> int:
        return len(self.manifest.files)
