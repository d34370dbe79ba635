"""Load a run, on any layout: every rank reads its own boxes out of the pieces that they overlap, and checks what it
reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.disk import Disk
from shoal.checkpoint.manifest import Entry, Manifest, Piece, Shape
from shoal.checkpoint.shard import DTYPES, Reader, Reading
from shoal.checkpoint.state import Held, Holder, held_by, make_states
from shoal.checkpoint.store import Store
from shoal.checkpoint.together import together
from shoal.comm.world import World
from shoal.errors import Problem, RunFailed, ShoalError
from shoal.numerics.pieces import local


class Misfit(ShoalError):
    """The checkpoint is whole, and of another model: an older one would be, too."""


def load(store: Store, holder: Holder, *, step: int, only_weights: bool = False) -> Manifest:
    """Fill this rank's part of a run with what was saved of a step; or its model alone. Returns its manifest."""
    manifest = store.manifest(step)
    if not only_weights:
        make_states(holder, _kinds(manifest), dict(manifest.state.get("scalars", {})))
    held = [piece for piece in held_by(holder) if not only_weights or piece.name.startswith("model/")]
    if misfits := list(_misfits(manifest, held)):
        raise Misfit(*misfits, title=f"step {step} of {store.where} is of another model")
    with _Files(store.path(step), manifest) as files, torch.no_grad():
        for piece in held:
            fill(piece, manifest.tensors[piece.name], files)
        for parameter, copy in holder.copies.items():
            copy.copy_(local(parameter))
    return manifest


def load_newest(
    stores: Sequence[Store], world: World, holder: Holder, say: Callable[[str], None] = lambda text: None
) -> Manifest | None:
    """Fill a run with the newest step that is whole, wherever it is; every rank calls it. None: there is none at all.
    What is damaged is told, and the one before it is tried."""
    places = {step: place for place, store in reversed([*enumerate(stores)]) for step in store.steps()}
    known = world.all_gather_object(places)[0]  # one rank has looked for all
    told: list[Problem] = []
    for step in sorted(known, reverse=True):
        try:
            return load_step(stores[known[step]], world, holder, step)
        except Misfit:
            raise
        except ShoalError as error:
            told += error.problems
            say(f"step {step} cannot be used, and the one before it is tried: {error}")
    if told:
        raise RunFailed(*told, title=f"the checkpoints in {stores[-1].where}, of which not one can be used")
    return None


def load_step(store: Store, world: World, holder: Holder, step: int, *, only_weights: bool = False) -> Manifest:
    """Fill a run with one step, or its model alone; every rank calls it, and all raise if one cannot."""
    how = {"failed": f"step {step} of {store.where} was not loaded", "fix": "load another step: --resume STEP"}
    return together(world, lambda: load(store, holder, step=step, only_weights=only_weights), **how)[0]


def fill(held: Held, entry: Entry, files: _Files) -> None:
    """A piece with what others have written of it."""
    for piece in entry.pieces:
        here, there = overlap(held.begin, tuple(held.value.shape), piece)
        if all(part.stop > part.start for part in here):
            files[piece.file].fill(held.value[here], piece.key, entry.dtype, piece.shape, there)


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
    """The files of a step, each opened when it is first asked for; they share the threads that read and hash."""

    def __init__(self, folder: Path, manifest: Manifest, disk: Disk | None = None) -> None:
        self.folder, self.manifest, self.disk = folder, manifest, disk or Disk()
        self._open: dict[str, Reader] = {}
        self._stack = ExitStack()
        self._reading = Reading()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: Any) -> None:
        self._reading.close()
        self._stack.close()

    def __getitem__(self, name: str) -> Reader:
        if name not in self._open:
            reader = Reader(self.folder / name, self.manifest.files[name], disk=self.disk, reading=self._reading)
            self._open[name] = self._stack.enter_context(reader)
        return self._open[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.files)

    def __len__(self) -> int:
        return len(self.manifest.files)
