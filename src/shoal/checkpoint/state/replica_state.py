"""State that differs between replicas, in a checkpoint.

Under `compress=` a replica has a residual. Under `sync=` it has its own weights and optimizer between exchanges. Both
are saved per replica:

    replica/2/residual/NAME           the residual of replica 2 (residual.tp1: of its tp rank 1, if each has its own)
    replica/2/model/NAME              the weights of replica 2; model/NAME are the shared weights
    replica/2/optimizer/STATE/NAME    its optimizer's state; then there is no optimizer/STATE/NAME
    replica/2/sent/NAME               the weights that replica 2 has sent, if the exchange is not applied yet
    outer/momentum/NAME, outer/arrived/NAME, narrow/BEGIN/NAME     the same for all

One rule restores them: with the same number of replicas, each gets its own; else all get the mean. A residual counts
1/W in the mean gradient, so the mean of the residuals is the total that was not sent. The mean of the replicas' weights
is the result of their next exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, takewhile

from torch import Tensor

from shoal.checkpoint.state.model_state import Holder, LocalShard
from shoal.checkpoint.storage.manifest import Manifest
from shoal.numerics.local_tensor import to_local
from shoal.parallel.data.bucket_averager import BucketAverager
from shoal.parallel.parallel_model import ParallelModel


def replica_shards(holder: Holder) -> Iterator[LocalShard]:
    """Yield the tensors of this rank that differ between replicas."""
    composed = holder.composed
    firsts = {second: first for first, second in composed.tied}

    def shards(kind: str, name: str, piece: Tensor, *, is_own: bool) -> Iterator[LocalShard]:
        known = firsts.get(name, name)
        comm_threads = _averagers(composed)[0].comm_threads
        path = f"replica/{comm_threads.rank}/{kind}/{known}" if is_own else f"{kind}/{known}"
        is_saved = composed.is_owner(name, besides=composed.sync_axes if is_own else ())
        for begin, value in composed.boxes_of(name, piece):
            yield LocalShard(
                path, composed.shapes[name], begin, value, is_saved, is_needed=False, replicas=comm_threads.size
            )

    for averager in _averagers(composed):
        for name, residual in averager.residuals():
            yield from _residual(composed, name, residual, averager)
        for name, matrix in averager.q_factors():
            begin, _ = composed.shard_boxes(name)[0]
            path = f"narrow/{','.join(map(str, begin))}/{firsts.get(name, name)}"
            is_saved = composed.is_owner(name)
            yield LocalShard(path, tuple(matrix.shape), (0, 0), matrix, is_saved, is_needed=False)
    local_sgd = composed.local_sgd
    if local_sgd is None:
        return
    for name in local_sgd.shared:
        parameter = composed.named[name]
        yield from shards("model", name, to_local(parameter).detach(), is_own=True)
        for kind, state in holder.states_of(parameter).items():
            if isinstance(state, Tensor) and state.dim():
                yield from shards(f"optimizer/{kind}", name, to_local(state), is_own=True)
        yield from shards("outer/momentum", name, local_sgd.momentum[name], is_own=False)
        if local_sgd.outer.delay:
            yield from shards("sent", name, local_sgd.sent[name], is_own=True)
            yield from shards("outer/arrived", name, local_sgd.arrived[name], is_own=False)


def _residual(composed: ParallelModel, name: str, residual: Tensor, averager: BucketAverager) -> Iterator[LocalShard]:
    """Yield the residual of a parameter. Copies whose gradients are summed only after averaging have one
    residual each: tp ranks of a partial weight, and two stages that share a parameter."""
    is_partial = composed.local_sgd is None and name in composed.tensor.partial
    kind = f"residual.tp{composed.tensor.index}" if is_partial else "residual"
    own = composed.sync_axes + (("tp",) if is_partial else ())
    is_saved = composed.is_owner(name, besides=own, and_copies=True)
    path = f"replica/{averager.comm_threads.rank}/{kind}/{name}"
    num_replicas = averager.comm_threads.size
    for begin, value in composed.boxes_of(name, residual):
        yield LocalShard(path, composed.shapes[name], begin, value, is_saved, is_needed=False, replicas=num_replicas)


def _averagers(composed: ParallelModel) -> list[BucketAverager]:
    if composed.local_sgd is not None:
        return composed.local_sgd.fragments
    return [] if composed.reducer is None else [composed.reducer.averager]


def sources(manifest: Manifest, piece: LocalShard, *, has_local_sgd: bool) -> list[str]:
    """Return the names of the tensors in a checkpoint whose mean fills a shard: one, several, or none.

    Both the shard and the checkpoint's tensors may be of one replica or of all. Without local SGD, a run takes the mean
    of the replicas' weights, not the shared weights of their last exchange.
    """
    if _is_of_another_rank(manifest, piece):
        return []
    plain = piece.name.split("/", 2)[2] if piece.name.startswith("replica/") else piece.name
    siblings = list(takewhile(manifest.tensors.__contains__, (f"replica/{r}/{plain}" for r in count())))
    is_shared = piece.name == plain and (has_local_sgd or not siblings)
    if piece.name in manifest.tensors and (is_shared or len(siblings) == piece.replicas > 1):
        return [piece.name]
    return siblings or [name for name in [plain] if name in manifest.tensors]


def _is_of_another_rank(manifest: Manifest, piece: LocalShard) -> bool:
    """Whether a factor Q of PowerSGD has another rank than this run's: then it cannot be used."""
    known = manifest.tensors.get(piece.name)
    return piece.name.startswith("narrow/") and known is not None and known.shape != piece.full_shape
