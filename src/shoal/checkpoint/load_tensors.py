"""Fill the weights of a run from lazy tensors, such as those of safetensors files: each rank reads its own boxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from shoal.checkpoint.formats.lazy_tensor import LazyTensor
from shoal.checkpoint.load import MismatchedModel, overlap
from shoal.checkpoint.state.model_state import Holder, LocalShard, base_shards, local_shards
from shoal.checkpoint.state.replica_state import replica_shards
from shoal.checkpoint.storage.manifest import Piece
from shoal.comm.all_or_none import all_or_none
from shoal.comm.world import World
from shoal.numerics.local_tensor import to_local
from shoal.parallel.lora.layers import is_adapter


def load_tensors(world: World, holder: Holder, tensors: Mapping[str, LazyTensor], where: str) -> None:
    """Fill the model of a run; every rank calls it, and all raise if one fails."""
    all_or_none(
        world,
        lambda: _load(holder, tensors, where),
        failed=f"the weights of {where!r} were not loaded",
        fix=f"ls {where}",
    )


def _load(holder: Holder, tensors: Mapping[str, LazyTensor], where: str) -> None:
    shards = list(_weights(holder))
    wrong = [
        name
        for name, shard in shards
        if (shard.is_needed and name not in tensors) or (name in tensors and tensors[name].shape != shard.full_shape)
    ]
    if wrong:
        raise MismatchedModel(
            f"{where!r} has no {wrong[0]} of this shape", fix="the weights of the model that is trained", code="C011"
        )
    if holder.composed.local_sgd is not None:
        holder.composed.local_sgd.forget()
    with torch.no_grad():
        for name, shard in shards:
            if name in tensors:
                fill(shard, tensors[name])
        for parameter, copy in holder.copies.items():
            copy.copy_(to_local(parameter))


def _weights(holder: Holder) -> Iterator[tuple[str, LocalShard]]:
    """The pieces of weights on this rank, with the names of the full tensors. Below adapters: the frozen ones, and
    buffers, such as the bias of a router."""
    if holder.composed.has_adapters:
        holder.composed.base_fingerprint = ""
        yield from ((shard.name.removeprefix("model/"), shard) for shard in base_shards(holder))
    for shard in local_shards(holder):
        name = shard.name.removeprefix("model/")
        if shard.name.startswith("model/") and not (holder.composed.has_adapters and is_adapter(name)):
            yield name, shard
    if holder.composed.has_adapters:
        return
    for shard in replica_shards(holder):  # replica/2/model/NAME
        kind, _, rest = shard.name.partition("/")
        if kind == "replica" and rest.partition("/")[2].startswith("model/"):
            yield rest.partition("/")[2].removeprefix("model/"), shard


def fill(shard: LocalShard, tensor: LazyTensor) -> None:
    """Fill a shard from the boxes that overlap it, one in memory at a time."""
    if shard.store is not None:
        shard.fill_store(lambda whole: fill(whole, tensor))
        return
    for box in tensor.boxes:
        here, there = overlap(shard.begin, tuple(shard.value.shape), Piece("", "", box.begin, box.shape))
        if all(part.stop > part.start for part in here):
            shard.value[here] = box.read()[there].to(shard.value)
