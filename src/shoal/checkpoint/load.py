"""Load a run on any layout: every rank reads its own boxes from the pieces that they overlap, and checks the bytes.

A weight of 6 rows, saved by two ranks and loaded by three:

    saved    file 0 │ 0  1  2 │        file 1 │ 3  4  5 │
    loaded   rank 0 │ 0  1 │   rank 1 │ 2 │ 3 │   rank 2 │ 4  5 │
                     one piece         two pieces [4]

[1] The optimizer has no state before its first step: it is made first, with the kinds that were saved, to be filled.
[2] Each rank says which tensors of the checkpoint fill its own ones. Usually one does. Under local SGD there is one
    of each replica, and if the number of replicas has changed, all get the mean.
[3] All names and shapes are compared before the first byte is read: no weight of another model is loaded.
[4] A box is read from every piece that overlaps it, by blocks of rows. No rank ever needs a full tensor.
[5] Ranks fail together. If one could not read a step, all try the next older one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.state.base_fingerprint import BASE
from shoal.checkpoint.state.model_state import Holder, LocalShard, base_shards, local_shards, make_states
from shoal.checkpoint.state.replica_state import replica_shards, sources
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.manifest import NAME, Entry, Manifest, Piece, Shape
from shoal.checkpoint.storage.shard_file import DTYPES, Reader, Reading
from shoal.checkpoint.storage.store import Store
from shoal.comm.all_or_none import all_or_none, on_main
from shoal.comm.world import World
from shoal.errors import Problem, RunFailed, ShoalError
from shoal.numerics.local_tensor import to_local
from shoal.numerics.optim.adamw import AdamW


class MismatchedModel(ShoalError):
    """The checkpoint is intact but of another model; an older one would be, too."""


def load(store: Store, holder: Holder, *, step: int, only_weights: bool = False) -> Manifest:
    """Fill this rank's part of a run, or its model alone, from a saved step. Return its manifest."""
    manifest = store.manifest(step)
    if holder.composed.local_sgd is not None:
        holder.composed.local_sgd.forget()
    if not only_weights:
        _reject_missing_scalars(manifest, store, counts_steps=isinstance(holder.optimizer, _COUNT_STEPS))
    read_from = _sources_of(holder, manifest, only_weights=only_weights)
    if mismatches := list(_mismatches(manifest, read_from)):  # [3]
        more = f"; and {len(mismatches) - 4} more" if len(mismatches) > 4 else ""
        raise MismatchedModel(
            f"step {step} of {store.where} is of another model: {'; '.join(mismatches[:4])}{more}",
            fix="load with the model and the optimizer that were saved",
            code="C011",
        )
    with _Files(store.path(step), manifest, store.disk) as files, torch.no_grad():
        for piece, names in read_from:
            fill_with_mean(piece, [manifest.tensors[name] for name in names], files)
        for parameter, copy in holder.copies.items():
            copy.copy_(to_local(parameter))
    return manifest


def _sources_of(holder: Holder, manifest: Manifest, *, only_weights: bool) -> list[tuple[LocalShard, list[str]]]:
    """This rank's pieces, and for each the names of the tensors that fill it."""
    if not only_weights:
        assert holder.optimizer is not None
        holder.optimizer.state.clear()  # of another step
        make_states(holder, _kinds(manifest), dict(manifest.state.get("scalars", {})))  # [1]
    pieces = _weights(holder, manifest) if only_weights else list(local_shards(holder))
    of_replicas = [piece for piece in replica_shards(holder) if not only_weights or "/model/" in piece.name]
    has_local_sgd = holder.composed.local_sgd is not None
    # [2] which tensors fill each piece
    return [(piece, sources(manifest, piece, has_local_sgd=has_local_sgd)) for piece in (*pieces, *of_replicas)]


def needed_files(manifest: Manifest, holder: Holder) -> set[str]:
    """The files of a step from which this rank would read."""
    found: set[str] = set()
    for shard, names in _sources_of(holder, manifest, only_weights=False):
        for entry in (manifest.tensors[name] for name in names):
            if entry.shape == shard.full_shape:  # else `load` reports another model
                shape = tuple(shard.value.shape)
                found |= {piece.file for piece in entry.pieces if _is_filled(overlap(shard.begin, shape, piece)[0])}
    return found


def _is_filled(part: Sequence[slice]) -> bool:
    return all(each.stop > each.start for each in part)


def _weights(holder: Holder, manifest: Manifest) -> list[LocalShard]:
    """What the weights of a step fill. Of a model with LoRA: its base, and its adapters if the step has them; from a
    step of adapters alone, the adapters."""
    own = [piece for piece in local_shards(holder) if piece.name.startswith("model/")]
    if not holder.composed.has_adapters or BASE in manifest.state:
        return own
    holder.composed.base_fingerprint = ""
    return [*base_shards(holder), *(piece for piece in own if piece.name in manifest.tensors)]


def load_newest(
    stores: Sequence[Store], world: World, holder: Holder, say: Callable[[str], None] = lambda text: None
) -> Manifest | None:
    """Fill a run from the newest intact step of all stores; every rank calls it. None: there is no step. Damaged steps
    are reported, and the previous one is tried."""
    problems: list[Problem] = []
    known, damaged = _known(stores, world)
    for path in damaged:
        say(f"{path} has no {NAME} and is skipped")
    for step, places in sorted(known.items(), reverse=True):
        for place in places:
            try:
                return load_step(stores[place], world, holder, step)
            except MismatchedModel:  # an older step is of that model, too
                raise
            except ShoalError as error:
                problems += error.problems  # [5] on every rank, since `load_step` raises on all
                say(f"step {step} of {stores[place].where} cannot be used, trying the next one: {error}")
    if problems:
        raise RunFailed(*problems, title=f"the checkpoints in {stores[-1].where}, none of which can be used")
    return None


def _known(stores: Sequence[Store], world: World) -> tuple[dict[int, list[int]], list[str]]:
    """Map steps to the stores that have them, as the main rank sees it; and list the paths of damaged steps."""

    def look() -> tuple[dict[int, list[int]], list[str]]:
        found: dict[int, list[int]] = {}
        for place, store in enumerate(stores):
            for step in store.steps():
                found.setdefault(step, []).append(place)
        return found, [str(store.root / name) for store in stores for name in store.damaged()]

    return on_main(world, look, failed=f"{stores[-1].where} was not read")


def load_step(store: Store, world: World, holder: Holder, step: int, *, only_weights: bool = False) -> Manifest:
    """Fill a run, or its model alone, from one step; every rank calls it, and all raise if one fails."""
    failed, fix = f"step {step} of {store.where} was not loaded", "--resume STEP, with another step"
    read: list[Manifest] = []

    def act() -> None:
        read.append(load(store, holder, step=step, only_weights=only_weights))

    all_or_none(world, act, failed=failed, fix=fix)  # [5]
    return read[0]


def fill_with_mean(shard: LocalShard, entries: Sequence[Entry], files: _Files) -> None:
    """Fill a shard with the mean of the replicas' tensors, or with the one that all share."""
    if shard.store is not None and entries:
        shard.fill_store(lambda whole: fill_with_mean(whole, entries, files))
        return
    if len(entries) == 1:
        fill(shard, entries[0], files)
    elif entries:
        one, total = torch.empty_like(shard.value), torch.zeros_like(shard.value)
        for entry in entries:
            fill(replace(shard, value=one), entry, files)
            total += one
        shard.value.copy_(total / len(entries))
    elif shard.name.startswith(("replica/", "outer/")):
        shard.value.zero_()  # no residual


def fill(shard: LocalShard, entry: Entry, files: _Files) -> None:
    """Fill a shard from the saved pieces that overlap it."""
    for piece in entry.pieces:
        here, there = overlap(shard.begin, tuple(shard.value.shape), piece)
        if _is_filled(here):  # [4]
            files[piece.file].fill(shard.value[here], piece.key, entry.dtype, piece.shape, there)


def overlap(begin: Shape, shape: Shape, piece: Piece) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the overlap of a box with a piece, as slices of the box and as slices of the piece.

    >>> overlap((2,), (4,), Piece("", "", (0,), (3,)))
    ((slice(0, 1, None),), (slice(2, 3, None),))
    """
    here, there = [], []
    for own, size, other, extent in zip(begin, shape, piece.begin, piece.shape, strict=True):
        first, last = max(own, other), max(max(own, other), min(own + size, other + extent))
        here.append(slice(first - own, last - own))
        there.append(slice(first - other, last - other))
    return tuple(here), tuple(there)


def _kinds(manifest: Manifest) -> dict[str, dict[str, tuple[torch.dtype, Shape]]]:
    """Map parameters to the kinds of their saved states, with dtype and shape."""
    found: dict[str, dict[str, tuple[torch.dtype, Shape]]] = {}
    for name, entry in manifest.tensors.items():
        plain = name.removeprefix("replica/0/")
        if plain.startswith("optimizer/"):
            _, kind, parameter = plain.split("/", 2)
            found.setdefault(parameter, {})[kind] = DTYPES[entry.dtype], entry.shape
    return found


_COUNT_STEPS = (torch.optim.Adam, torch.optim.AdamW, AdamW)
"""Optimizers that keep a step counter per parameter, and cannot continue without it."""


def _reject_missing_scalars(manifest: Manifest, store: Store, *, counts_steps: bool) -> None:
    """Reject moments of Adam without their step counter, where it is expected: the optimizer keeps one per parameter,
    or the checkpoint has it for other parameters. Lion has one moment and no counter; FusedAdam has one per group."""
    scalars = manifest.state.get("scalars", {})
    if not counts_steps and not any("step" in numbers for numbers in scalars.values()):
        return
    for parameter, kinds in _kinds(manifest).items():
        if kinds.keys() >= {"exp_avg", "exp_avg_sq"} and "step" not in scalars.get(parameter, {}):
            raise ShoalError(
                f"step {manifest.step} of {store.where} must have a step counter for the moments of {parameter!r}, got"
                " none",
                fix="--resume STEP with another step, or --run.start_from for the weights alone",
                code="C012",
            )


def _mismatches(manifest: Manifest, read_from: Sequence[tuple[LocalShard, list[str]]]) -> Iterator[str]:
    for piece, names in read_from:
        if not names and piece.is_needed:
            yield f"it has no {piece.name}"
        for entry in (entry for entry in map(manifest.tensors.__getitem__, names) if entry.shape != piece.full_shape):
            yield f"{piece.name} has the shape {list(entry.shape)} in the checkpoint and {list(piece.full_shape)} here"


class _Files(Mapping[str, Reader]):
    """The files of a step, opened on first use; they share the threads that read and hash."""

    def __init__(self, folder: Path, manifest: Manifest, disk: Filesystem | None = None) -> None:
        self.folder, self.manifest, self.disk = folder, manifest, disk or Filesystem()
        self._open: dict[str, Reader] = {}
        self._stack = ExitStack()
        self._reading = Reading(at_once=self.disk.reads_at_once)

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
