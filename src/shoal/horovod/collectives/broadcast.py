"""broadcast: every rank gets the tensor of one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.horovod import context
from shoal.horovod.collectives.requests import applied, send, wait
from shoal.horovod.engine.messages import Kind
from shoal.horovod.process_sets import ProcessSet, global_process_set
from shoal.horovod.reduce_ops import ReduceOp


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensor of `root_rank`, which counts among all ranks also in a process set."""
    result: Tensor = applied(_Broadcast, tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite the tensor with that of `root_rank`, and return it."""
    result: Tensor = wait(broadcast_async_(tensor, root_rank, name, process_set))
    return result


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin a broadcast; return a handle."""
    return _send(tensor, root_rank, name, process_set, in_place=False)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to overwrite the tensor; return a handle."""
    return _send(tensor, root_rank, name, process_set, in_place=True)


def _send(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool) -> int:
    if context.is_initialized() and root_rank not in process_set.ranks:
        what = f"root_rank must be one of the ranks {process_set.ranks}, got {root_rank}"
        raise ShoalError(what, fix=f"root_rank={(process_set.ranks or [0])[0]}", code="H018")
    outputs = [tensor] if in_place else ()
    return send(Kind.BROADCAST, [tensor], name, process_set, outputs=outputs, root=root_rank)


class _Broadcast(torch.autograd.Function):
    """Forward: the tensor of the root. Backward: the average of the gradients on the root, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return wait(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op = int(ReduceOp.AVERAGE)
        reduced = wait(send(Kind.ALLREDUCE, [grads[0].contiguous()], None, ctx.process_set, op=op))
        is_root = context.engine().world.rank == ctx.root_rank
        return (reduced if is_root else torch.zeros_like(reduced)), None, None, None
