"""reducescatter: every rank gets some rows of the reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Problem
from shoal.horovod.collectives.requests import applied, send, wait
from shoal.horovod.compression import Compression
from shoal.horovod.engine.messages import Kind
from shoal.horovod.errors import internal
from shoal.horovod.process_sets import ProcessSet, global_process_set
from shoal.horovod.reduce_ops import Average, ReduceOp


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return my rows of the reduction. If rows do not divide evenly, the first ranks have one more."""
    small, ctx = compression.compress(tensor)
    (mine,) = applied(_ReduceScatter, name, op, (prescale_factor, postscale_factor), process_set, False, small)
    result: Tensor = compression.decompress(mine, ctx)
    return result


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin; return a handle."""
    return _send([tensor], name, op, (prescale_factor, postscale_factor), process_set, is_group=False)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return my rows of the reductions of several tensors."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    scales = (prescale_factor, postscale_factor)
    mine = applied(_ReduceScatter, name, op, scales, process_set, True, *[each for each, _ in compressed])
    return [compression.decompress(each, ctx) for each, (_, ctx) in zip(mine, compressed, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin for several tensors; return one handle."""
    return _send(tensors, name, op, (prescale_factor, postscale_factor), process_set, is_group=True)


def _send(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    scales: tuple[float, float],
    process_set: ProcessSet,
    *,
    is_group: bool,
) -> int:
    if op == ReduceOp.ADASUM:
        raise internal(Problem("H023", "reducescatter has no op Adasum", "op=hvd.Average, or hvd.allreduce(...)"))
    before, after = map(float, scales)
    return send(
        *(Kind.REDUCESCATTER, tensors, name, process_set),
        is_group=is_group,
        op=int(op),
        prescale=before,
        postscale=after,
    )


class _ReduceScatter(torch.autograd.Function):
    """Forward: my rows of the reduction. Backward: the gradients of all rows, with the factor of Horovod's average."""

    @staticmethod
    def forward(
        ctx: Any, name: Any, op: int, scales: Any, process_set: ProcessSet, is_group: bool, *tensors: Tensor
    ) -> Any:
        ctx.arguments = (op, scales, process_set)
        result = wait(_send(tensors, name, op, scales, process_set, is_group=is_group))
        return tuple(result) if is_group else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, scales, process_set = ctx.arguments
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            what = f"reducescatter has a gradient for op Average and Sum, got {ReduceOp(op).name}"
            raise NotImplementedError(str(Problem("H022", what, "tensor.detach(), or op=hvd.Sum")))
        factor = scales[0] * scales[1] * (len(process_set.ranks) if op == ReduceOp.SUM else 1)
        whole = wait(send(Kind.ALLGATHER, [each * factor for each in grads], None, process_set, is_group=True))
        return (None, None, None, None, None, *whole)
