"""Save a run: every rank writes what it alone has to tell, one rank says that it is done.

rank 0    make the draft ─┐                        ┌─ manifest, rename, latest ─┐
all       ────────────────┴─ write a shard, fsync ─┴────────────────────────────┴─ done, or all raise
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from shoal.checkpoint import shard
from shoal.checkpoint.manifest import Entry, File, Manifest, Piece, Shape
from shoal.checkpoint.state import Held, held_by, scalars_of
from shoal.checkpoint.store import Store
from shoal.comm.world import World
from shoal.errors import RunFailed
from shoal.parallel.composed import Composed

Told = tuple[str, str, Shape, Shape, Shape]
"""Of one piece: the tensor's name, its dtype and whole shape, where the piece begins, and its shape."""


def save(
    store: Store, world: World, composed: Composed, optimizer: Optimizer, *, step: int, state: Mapping[str, Any]
) -> None:
    """Write one step; returns on every rank when it is on the disk, and raises on every rank if it could not be."""
    _together(world, step, lambda: store.begin(step) and None if world.is_main else None)
    told = _together(world, step, lambda: _write_own(store, world, composed, optimizer, step))
    scalars = {name: numbers for _, _, _, own in told for name, numbers in own.items()}
    _together(world, step, lambda: _commit(store, told, step, {**state, "scalars": scalars}) if world.is_main else None)


def _together(world: World, step: int, act: Any) -> list[Any]:
    """What an action gave on every rank. If it failed on one, all raise, and say where and why."""
    try:
        outcome: tuple[Any, str | None] = (act(), None)
    except OSError as error:
        outcome = (None, f"{error.strerror}: {error.filename}")
    outcomes = world.all_gather_object(outcome)
    for rank, (_, why) in enumerate(outcomes):
        if why is not None:
            raise RunFailed(
                f"the checkpoint of step {step} was not saved: rank {rank}: {why}; the one before it is as it was",
                fix="make room, or --run.dir SOMEWHERE that can be written to",
            )
    return [value for value, _ in outcomes]


def _write_own(
    store: Store, world: World, composed: Composed, optimizer: Optimizer, step: int
) -> tuple[str, File | None, list[Told], dict[str, dict[str, float]]]:
    own = [
        piece for piece in held_by(composed, optimizer) if piece.is_told and (piece.value.numel() or not piece.begin)
    ]
    name = f"shard-{world.rank:05d}.safetensors"
    file = shard.write(store.draft(step) / name, {key_of(p): p.value for p in own}, store.disk) if own else None
    told = [
        (piece.name, shard.NAMES[piece.value.dtype], piece.whole, piece.begin, tuple(piece.value.shape))
        for piece in own
    ]
    return name, file, told, scalars_of(composed, optimizer)


def key_of(piece: Held) -> str:
    """Its name in a file: that of the tensor, and where it begins unless it is at the start."""
    return piece.name if not any(piece.begin) else f"{piece.name}@{','.join(map(str, piece.begin))}"


def _commit(store: Store, told: list[Any], step: int, state: Mapping[str, Any]) -> None:
    files = {name: file for name, file, _, _ in told if file is not None}
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[str, Shape]] = {}
    for file, _, of_rank, _ in told:
        for name, dtype, whole, begin, shape in of_rank:
            kinds[name] = (dtype, whole)
            key = name if not any(begin) else f"{name}@{','.join(map(str, begin))}"
            pieces.setdefault(name, []).append(Piece(file, key, tuple(begin), tuple(shape)))
    tensors = {name: Entry(*kinds[name], tuple(found)) for name, found in pieces.items()}
    store.commit(Manifest(step=step, tensors=tensors, files=files, state=state))
