"""alltoall: every rank sends some of its rows to every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.horovod.collectives.requests import applied, send, wait
from shoal.horovod.engine.messages import Kind
from shoal.horovod.process_sets import ProcessSet, global_process_set

Splits = Tensor | Sequence[int] | None


def alltoall(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the rows that other ranks have sent. With `splits`, also how many came from each rank."""
    arrived, received = applied(_AllToAll, tensor, splits, name, process_set)
    return arrived if splits is None else (arrived, received)


def alltoall_async(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to send; return a handle, whose result is the rows and how many came from each rank."""
    rows = _checked(tensor, splits, len(process_set.ranks))
    return send(Kind.ALLTOALL, [tensor], name, process_set, rows=rows)


def with_counts(result: Any, splits: Splits) -> tuple[Tensor, Tensor]:
    """Return rows and counts, the counts as a tensor of the kind of `splits`."""
    arrived, received = result
    device = splits.device if isinstance(splits, Tensor) else "cpu"
    return arrived, torch.tensor(received, dtype=torch.int32, device=device)


def _checked(tensor: Tensor, splits: Splits, size: int) -> tuple[int, ...]:
    length = tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if length % size:
            what = f"alltoall without splits needs rows that divide by {size} ranks, got {length}"
            raise ShoalError(what, fix="splits=[...], with the rows for each rank", code="H007")
        return (length // size,) * size
    given = splits if isinstance(splits, Tensor) else torch.tensor(splits)
    if given.is_floating_point() or given.dim() != 1:
        what = f"splits must be a list of whole numbers, got {given.dtype} of shape {list(given.shape)}"
        raise ShoalError(what, fix="splits=torch.tensor([...], dtype=torch.int32)", code="H007")
    rows = tuple(int(each) for each in given.tolist())
    if len(rows) != size or min(rows) < 0 or sum(rows) > length:
        what = f"splits must have {size} counts of at most {length} rows together, got {list(rows)}"
        raise ShoalError(what, fix="splits=[...], with the rows for each rank", code="H007")
    return rows


class _AllToAll(torch.autograd.Function):
    """Forward: rows go to their ranks. Backward: their gradients come back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet) -> Any:
        arrived, received = with_counts(wait(alltoall_async(tensor, splits, name, process_set)), splits)
        ctx.process_set, ctx.received, ctx.rows = process_set, received, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return arrived, received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back, _ = wait(alltoall_async(grads[0].contiguous(), ctx.received, None, ctx.process_set))
        unsent = ctx.rows - back.shape[0]  # rows beyond the sum of splits went nowhere
        if unsent:
            back = torch.cat([back, back.new_zeros(unsent, *back.shape[1:])])
        return back, None, None, None
