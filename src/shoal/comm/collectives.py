"""Collectives that return their result: one tensor in, one tensor out, joined or cut along any dim.

torch's own write into a tensor that the caller has created, and join along the first dim only. A group of None is a
group of one rank, for which each of these is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm import plain_data
from shoal.errors import RunFailed, ShoalError

T = TypeVar("T")

Group = dist.ProcessGroup | None

# torch 2.13 renamed these two and warns of the old names; 2.11 has only the old names.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Sum (or reduce by `op`) over the group."""
    if group is None:
        return x
    total = x.contiguous().clone()
    dist.all_reduce(total, op, group=group)
    return total


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Join the parts of all ranks along a dim, in the order of the group. All parts have one shape."""
    if group is None:
        return x
    degree = group.size()
    parts = x.new_empty(degree * x.shape[0], *x.shape[1:]) if x.dim() else x.new_empty(degree)
    _gather(parts, x.contiguous(), group=group)
    dim = dim % x.dim()
    if dim == 0:
        return parts
    joined: Tensor = parts.unflatten(0, (degree, x.shape[0])).movedim(0, dim).flatten(dim, dim + 1)
    return joined


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return my part, along a dim, of the sum over the group. The dim must be divisible by the number of ranks."""
    if group is None:
        return x
    dim = dim % x.dim()
    parts = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    mine = x.new_empty(parts.shape[1:])
    _scatter(mine, parts.flatten(0, 1), group=group)
    return mine


def my_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's part of a tensor along a dim, cut as `torch.chunk` does; a view."""
    if group is None:
        return x
    return part(x, dim, index=dist.get_rank(group), degree=group.size())


def part(x: Tensor, dim: int, *, index: int, degree: int) -> Tensor:
    """Return part `index` of `degree`, cut as `torch.chunk` does: equal sizes, the last ones smaller or empty."""
    start = min(index * -(-x.shape[dim] // degree), x.shape[dim])
    return x.narrow(dim, start, part_size(x.shape[dim], index=index, degree=degree))


def part_size(size: int, *, index: int, degree: int) -> int:
    """Return the size of part `index`, of `size` in all."""
    largest = -(-size // degree)
    return max(0, min(largest, size - index * largest))


def join(x: Tensor, dim: int, group: Group, size: int) -> Tensor:
    """Invert `my_part`: join the parts of all ranks, `size` in all. The last parts may be smaller."""
    if group is None:
        return x
    missing = list(x.shape)
    missing[dim] = -(-size // group.size()) - x.shape[dim]
    if missing[dim]:
        x = torch.cat([x, x.new_zeros(missing)], dim)
    joined = all_gather(x, dim, group)
    return joined if joined.shape[dim] == size else joined.narrow(dim, 0, size).contiguous()


def all_reduce_together(tensors: list[Tensor], group: Group) -> None:
    """Sum many small tensors over the group in place, in one collective per dtype."""
    if group is None:
        return
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):  # the same order on every rank
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.all_reduce(flat, group=group)
        pieces = flat.split([tensor.numel() for tensor in alike])
        torch._foreach_copy_(alike, [piece.view(tensor.shape) for piece, tensor in zip(pieces, alike, strict=True)])


def all_gather_plain(value: T, group: Group, kinds: Sequence[type] = ()) -> list[T]:
    """Gather one value per rank, in the group's order; `plain_data` says what can be sent. Received dataclasses must be
    of `kinds`. If one rank's value cannot be sent, every rank raises."""
    if group is None or group.size() == 1:
        return [value]
    try:
        data = b"\1" + plain_data.to_bytes(value, kinds)
    except (TypeError, ValueError) as error:
        data = b"\0" + plain_data.to_bytes(str(error))
    device = _control_device(group)
    sizes = all_gather(torch.tensor([len(data)], device=device), 0, group).tolist()
    if not all(0 < size <= plain_data.LIMIT + 1 for size in sizes):
        raise RunFailed(
            f"values sent between ranks must have at most {plain_data.LIMIT:,} bytes, got {sizes}",
            fix="torch.distributed.all_gather of a tensor, for values of this size",
            code="N019",
        )
    mine = torch.zeros(max(sizes), dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = all_gather(mine.to(device).unsqueeze(0), 0, group).cpu().numpy()
    return [
        _arrived(memoryview(row)[:size], rank, kinds) for rank, (row, size) in enumerate(zip(rows, sizes, strict=True))
    ]


def _arrived(data: memoryview, rank: int, kinds: Sequence[type]) -> Any:
    try:
        value = plain_data.from_bytes(data[1:], kinds)
    except ValueError as error:
        what = f"rank {rank} of a group sent malformed data: {error}"
        raise RunFailed(what, fix="shoal --version on every host, which must be the same", code="N020") from None
    if data[0] != 1:
        raise ShoalError(
            f"rank {rank} of a group has a value that cannot be sent to the others: {value}",
            fix="send dicts, lists and tuples of tensors, numbers and text",
            code="N019",
        )
    return value


def _control_device(group: dist.ProcessGroup) -> torch.device:
    """The CPU, unless the group takes CUDA tensors alone."""
    return torch.device("cpu" if "cpu:" in dist.get_backend_config(group) else "cuda")
