"""Execute collectives on tensors through torch.distributed. A group of None is a group of one rank.

Data that is only moved travels as bytes, so every dtype works, and tensors of several dtypes share one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.collectives import Group, all_gather, reduce_scatter
from shoal.horovod.engine.adasum import adasum_
from shoal.horovod.engine.messages import Request
from shoal.horovod.engine.scaling import finish_, multiply_
from shoal.horovod.reduce_ops import ReduceOp

_TORCH_OPS = {
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}
_WIDENED = {torch.int16: torch.int32, torch.bool: torch.int32}
"""What gloo cannot reduce."""


def allreduce(inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], like: Request, group: Group) -> list[Tensor]:
    """Reduce tensors of every rank. An output of None is created; others are written, also if they are the input."""
    results: list[Tensor | None] = [None] * len(inputs)
    for dtype in dict.fromkeys(each.dtype for each in inputs):
        where = [index for index, each in enumerate(inputs) if each.dtype == dtype]
        alike = [inputs[index] for index in where]
        if len(alike) == 1 or like.op == ReduceOp.ADASUM:
            reduced = [_reduce_one(inputs[index], outputs[index], like, group) for index in where]
        else:
            reduced = _reduce_fused(alike, [outputs[index] for index in where], like, group)
        for index, result in zip(where, reduced, strict=True):
            results[index] = result
    return [each for each in results if each is not None]


def _reduce_one(tensor: Tensor, output: Tensor | None, like: Request, group: Group) -> Tensor:
    if output is tensor and tensor.is_contiguous():
        buffer = tensor
    else:
        buffer = tensor.clone(memory_format=torch.contiguous_format)
    _reduce_(buffer, like, group)
    if output is None or output is buffer:
        return buffer
    return output.copy_(buffer)


def _reduce_fused(
    tensors: Sequence[Tensor], outputs: Sequence[Tensor | None], like: Request, group: Group
) -> list[Tensor]:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    _reduce_(flat, like, group)
    pieces = [
        piece.view(tensor.shape)
        for piece, tensor in zip(flat.split([each.numel() for each in tensors]), tensors, strict=True)
    ]
    return [
        piece.clone() if output is None else output.copy_(piece) for piece, output in zip(pieces, outputs, strict=True)
    ]


def _reduce_(buffer: Tensor, like: Request, group: Group) -> None:
    multiply_(buffer, like.prescale)
    if like.op == ReduceOp.ADASUM:
        adasum_(buffer, group)
    elif group is not None and buffer.numel():
        if buffer.dtype in _WIDENED and buffer.device.type == "cpu":
            wide = buffer.to(_WIDENED[buffer.dtype])
            dist.all_reduce(wide, _TORCH_OPS[ReduceOp(like.op)], group=group)
            buffer.copy_(wide)
        else:
            dist.all_reduce(buffer, _TORCH_OPS[ReduceOp(like.op)], group=group)
    finish_(buffer, like.op, like.postscale, 1 if group is None else group.size())


def reducescatter(tensor: Tensor, like: Request, group: Group) -> Tensor:
    """Reduce, and return my rows. If they do not divide evenly, the first ranks have one more."""
    buffer = tensor.clone(memory_format=torch.contiguous_format)
    if group is None:
        _reduce_(buffer, like, group)
        return buffer
    size, me = group.size(), dist.get_rank(group)
    base, more = divmod(tensor.shape[0], size)
    is_sum = like.op in (ReduceOp.SUM, ReduceOp.AVERAGE)
    if more or not is_sum or not tensor.numel() or tensor.dtype in _WIDENED:
        _reduce_(buffer, like, group)
        return buffer.narrow(0, me * base + min(me, more), base + (me < more)).clone()
    multiply_(buffer, like.prescale)
    mine = reduce_scatter(buffer, 0, group)
    finish_(mine, like.op, like.postscale, size)
    return mine


def broadcast(inputs: Sequence[Tensor], outputs: Sequence[Tensor | None], source: int, group: Group) -> list[Tensor]:
    """Copy the tensors of one rank (`source` counts within the group) to all."""
    is_source = group is None or dist.get_rank(group) == source
    results = [
        output if output is not None else (tensor.clone() if is_source else torch.empty_like(tensor))
        for tensor, output in zip(inputs, outputs, strict=True)
    ]
    if group is None:
        return [
            result if result is tensor else result.copy_(tensor) for result, tensor in zip(results, inputs, strict=True)
        ]
    if len(results) == 1 and results[0].is_contiguous():
        if is_source and results[0] is not inputs[0]:
            results[0].copy_(inputs[0])
        if results[0].numel():
            dist.broadcast(as_bytes(results[0]), group=group, group_src=source)
        return results
    flat = torch.cat([as_bytes(each) for each in inputs])
    if flat.numel():
        dist.broadcast(flat, group=group, group_src=source)
    return [
        result if is_source and result is tensor else result.copy_(piece.view(tensor.dtype).view(tensor.shape))
        for result, tensor, piece in zip(results, inputs, _pieces(flat, inputs), strict=True)
    ]


def allgather(inputs: Sequence[Tensor], rows: Sequence[Sequence[int]], group: Group) -> list[Tensor]:
    """Join the rows of all ranks, for each tensor. `rows[tensor][rank]` says how many a rank has."""
    if group is None:
        return [each.clone() for each in inputs]
    row_bytes = [_row_bytes(each) for each in inputs]
    sizes = [[count * width for count in counts] for counts, width in zip(rows, row_bytes, strict=True)]
    totals = [sum(each[rank] for each in sizes) for rank in range(group.size())]
    longest = max(totals)
    mine = torch.cat([as_bytes(each) for each in inputs]) if len(inputs) > 1 else as_bytes(inputs[0])
    padded = mine if mine.numel() == longest else torch.cat([mine, mine.new_zeros(longest - mine.numel())])
    if not longest:
        return [each.new_empty(sum(counts), *each.shape[1:]) for each, counts in zip(inputs, rows, strict=True)]
    gathered = all_gather(padded, 0, group)
    parts = [gathered[rank * longest : rank * longest + total] for rank, total in enumerate(totals)]
    joined = []
    for index, (tensor, counts) in enumerate(zip(inputs, rows, strict=True)):
        starts = [sum(each[rank] for each in sizes[:index]) for rank in range(group.size())]
        pieces = [part[at : at + sizes[index][rank]] for rank, (part, at) in enumerate(zip(parts, starts, strict=True))]
        whole = gathered if len(inputs) == 1 and len(set(totals)) == 1 else torch.cat(pieces)
        joined.append(whole.view(tensor.dtype).view(sum(counts), *tensor.shape[1:]))
    return joined


def alltoall(tensor: Tensor, sent: Sequence[Sequence[int]], group: Group) -> tuple[Tensor, list[int]]:
    """Send rows to every rank. `sent[a][b]` rows go from rank a to rank b. Returns what arrived, and from whom."""
    if group is None:
        return tensor.clone(), list(sent[0])
    me = dist.get_rank(group)
    received = [counts[me] for counts in sent]
    width = _row_bytes(tensor)
    arrived = torch.empty(sum(received) * width, dtype=torch.uint8, device=tensor.device)
    if width and sum(map(sum, sent)):
        outgoing = as_bytes(tensor)[: sum(sent[me]) * width]
        dist.all_to_all_single(
            arrived, outgoing, [each * width for each in received], [each * width for each in sent[me]], group=group
        )
    return arrived.view(tensor.dtype).view(sum(received), *tensor.shape[1:]), received


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements in order, as a flat tensor of bytes; a view if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _row_bytes(tensor: Tensor) -> int:
    count = tensor.element_size()
    for size in tensor.shape[1:]:
        count *= size
    return count


def _pieces(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Cut a buffer. Each piece is copied if its start does not fit the alignment of its dtype."""
    sizes = [each.numel() * each.element_size() for each in tensors]
    starts = [0, *accumulate(sizes)]
    found = []
    for at, size, tensor in zip(starts, sizes, tensors, strict=False):
        piece = flat[at : at + size]
        found.append(piece if at % tensor.element_size() == 0 else piece.clone())
    return found
