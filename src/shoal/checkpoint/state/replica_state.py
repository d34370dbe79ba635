"""What differs from replica to replica, in a checkpoint.

Under `compress=` a replica keeps what it could not send. Under `sync=` it has weights and an optimizer of its own until
islands meet. Each replica's is saved:

    replica/2/residual/NAME           what replica 2 owes to a gradient (residual.tp1: its tp rank 1, where each owes)
    replica/2/model/NAME              the weights of island 2; model/NAME are those that all share
    replica/2/optimizer/STATE/NAME    what its optimizer keeps; there is no optimizer/STATE/NAME then
    replica/2/sent/NAME               the weights that island 2 has sent, if what they come to has not been applied yet
    outer/momentum/NAME, outer/arrived/NAME, narrow/BEGIN/NAME     the same for all

One rule brings them back on another number of replicas: with as many as there were, each has its own; else all have the
mean. A residual counts 1/W for the mean gradient, so its mean is what all of them owed; and the mean of the islands is
what they would tell each other at their next meeting.
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
    """What this rank holds beside what `rank_share` says."""
    composed = holder.composed
    firsts = {second: first for first, second in composed.tied}

    def shard(kind: str, name: str, value: Tensor, *, is_own: bool) -> LocalShard:
        known = firsts.get(name, name)
        begin, _ = composed.shard_box(name)
        comm_threads = _averagers(composed)[0].comm_threads
        path = f"replica/{comm_threads.rank}/{kind}/{known}" if is_own else f"{kind}/{known}"
        is_saved = composed.is_owner(name, besides=composed.meeting_axes if is_own else ())
        return LocalShard(
            path, composed.shapes[name], begin, value, is_saved, is_needed=False, replicas=comm_threads.size
        )

    for averager in _averagers(composed):
        for name, residual in averager.residuals():
            yield _residual(composed, name, residual, averager)
        for name, matrix in averager.narrow():
            begin, _ = composed.shard_box(name)
            path = f"narrow/{','.join(map(str, begin))}/{firsts.get(name, name)}"
            is_saved = composed.is_owner(name)
            yield LocalShard(path, tuple(matrix.shape), (0, 0), matrix, is_saved, is_needed=False)
    local_sgd = composed.islands
    if local_sgd is None:
        return
    for name in local_sgd.shared:
        parameter = composed.named[name]
        yield shard("model", name, to_local(parameter).detach(), is_own=True)
        for kind, state in holder.optimizer.state.get(holder.updated(parameter), {}).items():
            if isinstance(state, Tensor) and state.dim():
                yield shard(f"optimizer/{kind}", name, to_local(state), is_own=True)
        yield shard("outer/momentum", name, local_sgd.momentum[name], is_own=False)
        if local_sgd.outer.delay:
            yield shard("sent", name, local_sgd.sent[name], is_own=True)
            yield shard("outer/arrived", name, local_sgd.arrived[name], is_own=False)


def _residual(composed: ParallelModel, name: str, residual: Tensor, averager: BucketAverager) -> LocalShard:
    """What is owed to a gradient. Copies that are summed up only after they have travelled owe each their own: tp ranks
    of a weight that each used for its own tokens, and two stages that hold one parameter."""
    is_partial = composed.islands is None and name in composed.tensor.partial
    kind = f"residual.tp{composed.tensor.index}" if is_partial else "residual"
    own = composed.meeting_axes + (("tp",) if is_partial else ())
    is_saved = composed.is_owner(name, besides=own, and_copies=True)
    begin, _ = composed.shard_box(name)
    path = f"replica/{averager.comm_threads.rank}/{kind}/{name}"
    return LocalShard(
        path, composed.shapes[name], begin, residual, is_saved, is_needed=False, replicas=averager.comm_threads.size
    )


def _averagers(composed: ParallelModel) -> list[BucketAverager]:
    if composed.islands is not None:
        return composed.islands.fragments
    return [] if composed.reducer is None else [composed.reducer.averager]


def sources(manifest: Manifest, piece: LocalShard, *, has_local_sgd: bool) -> list[str]:
    """Which tensors of a checkpoint a piece is the mean of: one, several, or none.

    `piece` is of one replica or of all, and so is what the checkpoint has. Who has no islands takes the mean of the
    weights of those that there were, not what they shared when they last met.
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
    """A narrow matrix of another width than is wanted now is no begin for one."""
    known = manifest.tensors.get(piece.name)
    return piece.name.startswith("narrow/") and known is not None and known.shape != piece.full_shape
