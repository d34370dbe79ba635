"""allgather: every rank gets the rows of all ranks, which may have different numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.horovod.collectives.requests import applied, send, wait
from shoal.horovod.engine.messages import Kind
from shoal.horovod.process_sets import ProcessSet, global_process_set
from shoal.horovod.reduce_ops import ReduceOp


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Join the tensors of all ranks along the first dim, in the order of ranks."""
    (result,) = applied(_AllGather, name, process_set, False, tensor)
    joined: Tensor = result
    return joined


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begin to join; return a handle."""
    return send(Kind.ALLGATHER, [tensor], name, process_set)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Join several tensors, each with those of the other ranks at its place in the list."""
    return list(applied(_AllGather, name, process_set, True, *tensors))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to join several tensors; return one handle."""
    return send(Kind.ALLGATHER, list(tensors), name, process_set, is_group=True)


class _AllGather(torch.autograd.Function):
    """Forward: all rows. Backward: the average of the gradients, of which each rank keeps those of its own rows."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, is_group: bool, *tensors: Tensor) -> Any:
        result = wait(send(Kind.ALLGATHER, tensors, name, process_set, is_group=is_group))
        ctx.process_set, ctx.rows = process_set, [tensor.shape[0] for tensor in tensors]
        return tuple(result) if is_group else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        whole = [each.contiguous() for each in grads]
        op = int(ReduceOp.AVERAGE)
        reduced = wait(send(Kind.ALLREDUCE, whole, None, ctx.process_set, is_group=True, op=op))
        counts = wait(send(Kind.ALLGATHER, [torch.tensor([ctx.rows])], None, ctx.process_set))
        starts = counts[: ctx.process_set.rank()].sum(0).tolist()
        mine = [each.narrow(0, at, rows) for each, at, rows in zip(reduced, starts, ctx.rows, strict=True)]
        return (None, None, None, *mine)
