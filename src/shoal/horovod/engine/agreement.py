"""Compare the requests of several ranks under one name: what must be equal, and what may differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shoal.errors import Problem
from shoal.horovod.engine.messages import Kind, Request
from shoal.horovod.reduce_ops import ReduceOp

FREE_ROWS = (Kind.ALLGATHER, Kind.ALLTOALL)
"""The first dim may differ from rank to rank."""


def find_mismatch(requests: Mapping[int, Request]) -> Problem | None:
    """Return the first difference that makes these requests no collective; None if they agree."""
    (first, reference), *others = sorted(requests.items())
    expected = dict(_compared(reference))
    for rank, request in others:
        for what, value in _compared(request):
            if expected.get(what) != value:
                return _problem(reference, what, {first: expected.get(what), rank: value})
    return None


def find_absent(request: Request, joined: int) -> Problem | None:
    """Return the problem of a collective that cannot do without a rank that has joined."""
    without_zero = request.op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
    if request.kind == Kind.ALLREDUCE and not without_zero:
        return None
    kind = f"{request.kind} with op={ReduceOp(request.op).name}" if without_zero else str(request.kind)
    what = f"{kind} {request.name!r} needs every rank, but rank {joined} has called join()"
    fix = "call join() on every rank before it; only sums and averages take zeros of joined ranks"
    return Problem("H004", what, fix)


def _compared(request: Request) -> Iterator[tuple[str, Any]]:
    """The order is that of the message: the most basic difference first."""
    yield "the kind of collective", str(request.kind)
    yield "the number of tensors", len(request.tensors)
    for index, tensor in enumerate(request.tensors):
        which = f" of tensor {index}" if len(request.tensors) > 1 else ""
        yield f"the dtype{which}", tensor.dtype
        shape = tensor.shape[1:] if request.kind in FREE_ROWS else tensor.shape
        yield f"the number of dims{which}", len(tensor.shape)
        yield f"the shape{which}{' after the first dim' if request.kind in FREE_ROWS else ''}", list(shape)
    yield "the device", request.device
    yield "op", request.op
    yield "root_rank", request.root
    yield "prescale_factor", request.prescale
    yield "postscale_factor", request.postscale
    if request.kind in (Kind.ADD_SET, Kind.REMOVE_SET):
        yield "the ranks of the process set", list(request.rows)


def _problem(request: Request, what: str, values: Mapping[int, Any]) -> Problem:
    got = " and ".join(f"{value} on rank {rank}" for rank, value in values.items())
    text = f"{request.kind} {request.name!r}: {what} must be the same on every rank, got {got}"
    return Problem("H002", text, "use one name for one tensor, with the same arguments on every rank")
