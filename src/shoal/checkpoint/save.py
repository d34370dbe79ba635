"""Save a run: every rank writes what it alone has to tell, one rank says that it is done.

rank 0    make the draft ─┐                        ┌─ manifest, rename, latest ─┐
all       ────────────────┴─ write a shard, fsync ─┴────────────────────────────┴─ done, or all raise
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch.optim import Optimizer

from shoal.checkpoint import shard
from shoal.checkpoint.manifest import Entry, File, Manifest, Piece, Shape
from shoal.checkpoint.state import held_by, scalars_of
from shoal.checkpoint.store import Store
from shoal.checkpoint.together import together
from shoal.comm.world import World
from shoal.parallel.composed import Composed

Told = tuple[str, str, Shape, Shape, Shape]
"""Of one piece: the tensor's name, its dtype and whole shape, where the piece begins, and its shape."""


def save(
    store: Store, world: World, composed: Composed, optimizer: Optimizer, *, step: int, state: Mapping[str, Any]
) -> None:
    """Write one step; returns on every rank when it is on the disk, and raises on every rank if it could not be."""
    how = {
        "failed": f"the checkpoint of step {step} was not saved, and the one before it is as it was",
        "fix": "make room, or save to a directory that can be written to",
    }
    together(world, lambda: store.begin(step) if world.is_main else None, **how)
    told = together(world, lambda: _write_own(store, world, composed, optimizer, step), **how)
    scalars = {name: numbers for _, _, _, own in told for name, numbers in own.items()}
    known = {**state, "scalars": scalars}
    together(world, lambda: _commit(store, told, step, known) if world.is_main else None, **how)


def _write_own(
    store: Store, world: World, composed: Composed, optimizer: Optimizer, step: int
) -> tuple[str, File | None, list[Told], dict[str, dict[str, float]]]:
    told_here = (piece for piece in held_by(composed, optimizer) if piece.is_told)
    own = [piece for piece in told_here if piece.value.numel() or not prod(piece.whole)]  # an empty share says nothing
    name = f"shard-{world.rank:05d}.safetensors"
    file = (
        shard.write(store.draft(step) / name, {key_of(p.name, p.begin): p.value for p in own}, store.disk)
        if own
        else None
    )
    told = [
        (piece.name, shard.NAMES[piece.value.dtype], piece.whole, piece.begin, tuple(piece.value.shape))
        for piece in own
    ]
    return name, file, told, scalars_of(composed, optimizer)


def key_of(name: str, begin: Shape) -> str:
    """What a piece is called in a file: as its tensor, and where it begins unless that is at the start."""
    return f"{name}@{','.join(map(str, begin))}" if any(begin) else name


def _commit(store: Store, told: list[Any], step: int, state: Mapping[str, Any]) -> None:
    files = {name: file for name, file, _, _ in told if file is not None}
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[str, Shape]] = {}
    for file, _, of_rank, _ in told:
        for name, dtype, whole, begin, shape in of_rank:
            kinds[name] = (dtype, whole)
            pieces.setdefault(name, []).append(Piece(file, key_of(name, begin), begin, shape))
    tensors = {name: Entry(*kinds[name], tuple(found)) for name, found in pieces.items()}
    store.commit(Manifest(step=step, tensors=tensors, files=files, state=state))
