"""Save a run: every rank writes its own shards, and one rank commits the step.

rank 0    make the draft [1] ─┐                            ┌─ manifest, rename, latest [3] ─┐
all       ────────────────────┴─ write a shard, fsync [2] ─┴────────────────────────────────┴─ done, or all raise [4]

[1] A draft has a name that no reader takes for a step. What is left of it after a crash is removed by the next save.
[2] Every shard is on the disk before the manifest is: a manifest never names bytes that a power loss could take.
[3] The rename makes the draft a step (in an object store, the manifest does). Before it the step does not exist, after
    it the step is complete.
[4] Each phase ends on all ranks or on none, so no rank reports a step as saved that another could not write.
[5] Where each host has a store of its own, the first rank of each host does what rank 0 does here. Each rank then also
    sends its shard to the next host. A step that exists on a host has the shards of that host and of the one before it.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.peers.host_ranks import HostRanks, on_leaders
from shoal.checkpoint.peers.transfer import send_files
from shoal.checkpoint.state.model_state import Holder, LocalShard, local_shards, scalars_of
from shoal.checkpoint.state.replica_state import replica_shards
from shoal.checkpoint.storage import shard_file
from shoal.checkpoint.storage.manifest import Entry, File, Manifest, Piece, Shape
from shoal.checkpoint.storage.store import Store
from shoal.comm.all_or_none import all_or_none, on_main
from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.observe.durable_write import FULL

SavedShard = tuple[str, str, Shape, Shape, Shape]
"""One piece: the tensor's name, its dtype and full shape, the piece's begin and its shape."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The shards of a step that one rank writes. `values` are the run's own tensors, or copies that it does not
    touch."""

    step: int
    pieces: list[LocalShard]
    values: list[Tensor]
    scalars: dict[str, dict[str, float]]
    state: Mapping[str, Any]

    @classmethod
    @torch.no_grad()  # else autograd handles every access to a shard, a tenth of a millisecond each
    def of(cls, holder: Holder, *, step: int, state: Mapping[str, Any]) -> Snapshot:
        """Return the run's state now, without a copy."""
        entries = (piece for piece in chain(local_shards(holder), replica_shards(holder)) if piece.is_saved)
        pieces = [
            piece for piece in entries if piece.value.numel() or not prod(piece.full_shape)
        ]  # empty shards are left out
        return cls(step, pieces, [piece.value for piece in pieces], scalars_of(holder), state)

    @property
    def num_bytes(self) -> int:
        """Bytes of the values."""
        return sum(value.numel() * value.element_size() for value in self.values)


def save(store: Store, world: World, snapshot: Snapshot, hosts: HostRanks | None = None) -> str:
    """Write one step. Return on every rank when it is on the disk, and raise on every rank if it fails. The returned
    text reports a problem that did not prevent the save; it is usually empty. `hosts`: the ranks that share a store;
    None: all."""
    hosts = hosts or HostRanks.shared(world)
    step = snapshot.step
    how = {
        "failed": f"the checkpoint of step {step} was not saved; the previous one is unchanged",
        "fix": "free disk space, or --checkpoint.dir DIR, which every rank can write to",
    }
    try:
        on_leaders(world, hosts, lambda: store.begin(step), **how)  # [1]
        # [2] and [4]: the sizes and hashes of all ranks arrive here, or the error of the first that failed
        written = all_or_none(world, lambda: _write_own(store, world, snapshot), kinds=(File,), **how)
        _copy(store, world, hosts, written, step, how)  # [5]
        scalars = {name: numbers for _, _, _, own in written for name, numbers in own.items()}
        known = {**snapshot.state, "scalars": scalars}
        if len(hosts.groups) == 1:
            return on_leaders(world, hosts, lambda: _commit(store, _manifest(written, step, known)), **how)  # [3]
        # One manifest on all hosts: the state of two ranks may differ, such as the seconds that they have waited.
        text = on_main(world, lambda: _manifest(written, step, known).to_bytes().decode(), **how)
        return on_leaders(world, hosts, lambda: _commit(store, Manifest.parse(text.encode())), **how)
    except ShoalError:
        if hosts.is_leader:
            store.abandon(step)
        raise


def _copy(
    store: Store, world: World, hosts: HostRanks, written: Sequence[Any], step: int, how: Mapping[str, str]
) -> None:
    """Send the shard of each rank to the next host."""
    files = {name: file for name, file, _, _ in written if file is not None}
    of_rank = {rank: name for rank, (name, file, _, _) in enumerate(written) if file is not None}
    transfers = list(hosts.to_next_host(of_rank))
    if transfers:
        folder = partial(store.draft, step)
        act = partial(send_files, world, transfers, files, source=folder, target=folder, disk=store.disk)
        all_or_none(world, act, kinds=(), **how)


def _write_own(
    store: Store, world: World, snapshot: Snapshot
) -> tuple[str, File | None, list[SavedShard], dict[str, dict[str, float]]]:
    name = f"shard-{world.rank:05d}.safetensors"
    pairs = list(zip(snapshot.pieces, snapshot.values, strict=True))
    keyed = {key_of(piece.name, piece.begin): value for piece, value in pairs}
    path = store.draft(snapshot.step) / name
    try:
        file = shard_file.write(path, keyed, store.disk) if pairs else None
    except OSError as error:
        raise _with_room(error, store, path, snapshot.num_bytes) from error
    entries = [(p.name, shard_file.NAMES[value.dtype], p.full_shape, p.begin, tuple(value.shape)) for p, value in pairs]
    return name, file, entries, snapshot.scalars


def _with_room(error: OSError, store: Store, path: Path, needed: int) -> OSError:
    """Add the missing bytes to the error of a full disk."""
    if error.errno not in FULL:
        return error
    try:
        written = store.disk.size(path)
    except OSError:
        written = 0
    free = store.disk.free(path.parent)
    known = f", and {free + written:,} are free" if error.errno == errno.ENOSPC and free is not None else ""
    what = f"{error.strerror}: this rank writes {needed:,} bytes{known}"
    return OSError(error.errno, what, error.filename)


def key_of(name: str, begin: Shape) -> str:
    """Return the key of a piece in a file: its tensor's name, with its begin unless that is the start."""
    return f"{name}@{','.join(map(str, begin))}" if any(begin) else name


def _manifest(written: list[Any], step: int, state: Mapping[str, Any]) -> Manifest:
    files = {name: file for name, file, _, _ in written if file is not None}
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[str, Shape]] = {}
    for file, _, of_rank, _ in written:
        for name, dtype, full_shape, begin, shape in of_rank:
            kinds[name] = (dtype, full_shape)
            pieces.setdefault(name, []).append(Piece(file, key_of(name, begin), begin, shape))
    tensors = {name: Entry(*kinds[name], tuple(found)) for name, found in pieces.items()}
    manifest = Manifest(step=step, tensors=tensors, files=files, state=state)
    Manifest.parse(manifest.to_bytes())  # a step that is reported as saved can be loaded
    return manifest


def _commit(store: Store, manifest: Manifest) -> str:
    unfinished: list[str] = []
    store.commit(manifest, unfinished.append)
    return "; ".join(unfinished)
