"""allreduce: every rank gets the reduction of the tensors of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import Problem
from shoal.horovod.collectives.allgather import allgather_async
from shoal.horovod.collectives.requests import applied, send, wait
from shoal.horovod.compression import Compression
from shoal.horovod.engine.messages import Kind
from shoal.horovod.process_sets import ProcessSet, global_process_set
from shoal.horovod.reduce_ops import Average, ReduceOp, resolve_op


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the reduction; the input is unchanged. The gradient is reduced in the same way."""
    small, ctx = compression.compress(tensor)
    scales = (prescale_factor, postscale_factor)
    (reduced,) = applied(_AllReduce, name, resolve_op(op, average), scales, process_set, False, small)
    result: Tensor = compression.decompress(reduced, ctx)
    return result


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce in place, and return the tensor."""
    scales = (prescale_factor, postscale_factor)
    result: Tensor = wait(_send([tensor], name, resolve_op(op, average), scales, process_set, in_place=True))
    return result


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin a reduction; return a handle for `poll` and `synchronize`."""
    return _send([tensor], name, resolve_op(op, average), (prescale_factor, postscale_factor), process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin a reduction in place; return a handle."""
    scales = (prescale_factor, postscale_factor)
    return _send([tensor], name, resolve_op(op, average), scales, process_set, in_place=True)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the reductions of several tensors, which are executed together."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    scales = (prescale_factor, postscale_factor)
    small = [each for each, _ in compressed]
    reduced = applied(_AllReduce, name, resolve_op(op, average), scales, process_set, True, *small)
    return [compression.decompress(each, ctx) for each, (_, ctx) in zip(reduced, compressed, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in place, and return them."""
    scales = (prescale_factor, postscale_factor)
    handle = _send(tensors, name, resolve_op(op, average), scales, process_set, in_place=True, is_group=True)
    result: list[Tensor] = wait(handle)
    return result


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin the reduction of several tensors; return one handle."""
    scales = (prescale_factor, postscale_factor)
    return _send(tensors, name, resolve_op(op, average), scales, process_set, is_group=True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin the reduction of several tensors in place; return one handle."""
    scales = (prescale_factor, postscale_factor)
    return _send(tensors, name, resolve_op(op, average), scales, process_set, in_place=True, is_group=True)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Begin the sum or average of sparse tensors by gathering indices and values; the result of the returned function
    is the sparse tensor, with an index once for each rank that has it."""
    indices = allgather_async(tensor._indices().transpose(0, 1).contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor._values(), f"{name}.values", process_set)

    def result() -> Tensor:
        all_values, all_indices = wait(values), wait(indices)
        if op == Average:
            all_values = all_values / len(process_set.ranks)
        place = all_indices.transpose(0, 1)
        return torch.sparse_coo_tensor(place, all_values, tensor.size(), check_invariants=False)

    return result


def _send(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    scales: tuple[float, float],
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    is_group: bool = False,
) -> int:
    if op == ReduceOp.ADASUM:
        _check_adasum(len(process_set.ranks))
    return send(
        Kind.ALLREDUCE,
        tensors,
        name,
        process_set,
        outputs=tensors if in_place else (),
        is_group=is_group,
        op=int(op),
        prescale=float(scales[0]),
        postscale=float(scales[1]),
    )


def _check_adasum(size: int) -> None:
    if size & (size - 1):
        what = f"Adasum needs a power of two of ranks, got {size}"
        raise NotImplementedError(str(Problem("H014", what, "op=hvd.Average, or 2, 4, 8, ... ranks")))


class _AllReduce(torch.autograd.Function):
    """Forward: the reduction. Backward: the same reduction of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, name: Any, op: ReduceOp, scales: Any, process_set: ProcessSet, is_group: bool, *tensors: Tensor
    ) -> Any:
        ctx.arguments = (op, scales, process_set, is_group)
        result = wait(_send(tensors, name, op, scales, process_set, is_group=is_group))
        return tuple(result) if is_group else (result,)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        op, scales, process_set, is_group = ctx.arguments
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            what = f"allreduce has a gradient for op Average and Sum, got {op.name}"
            raise NotImplementedError(str(Problem("H022", what, "tensor.detach(), or op=hvd.Sum")))
        reduced = applied(_AllReduce, None, op, scales, process_set, is_group, *[each.contiguous() for each in grads])
        return (None, None, None, None, None, *reduced)
