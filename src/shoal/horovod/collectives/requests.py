"""Turn the arguments of a collective into a request; reject on this rank what no rank could do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import ShoalError
from shoal.horovod import context
from shoal.horovod.engine.engine import describe
from shoal.horovod.engine.messages import Kind, Request
from shoal.horovod.process_sets import ProcessSet


def send(
    kind: Kind,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    *,
    outputs: Sequence[Tensor] = (),
    is_group: bool = False,
    **details: Any,
) -> int:
    """Ask for a collective and return its handle. Names of different kinds do not collide."""
    engine = context.engine()
    set_id = registered(kind, process_set)
    for tensor in tensors:
        _check_tensor(kind, tensor)
    request = Request(
        kind=kind,
        name=engine.unnamed(kind, set_id) if name is None else f"{kind}.{name}",
        set_id=set_id,
        tensors=describe(tensors),
        device=tensors[0].device.type if tensors else "cpu",
        **details,
    )
    return engine.submit(request, tensors, outputs, is_group=is_group)


def wait(handle: int) -> Any:
    """Return the result of a handle."""
    return context.engine().wait(handle)


def applied(function: Any, *arguments: Any) -> Any:
    """Call a `torch.autograd.Function`, whose `apply` has no types."""
    return function.apply(*arguments)


def registered(kind: Kind, process_set: ProcessSet) -> int:
    """Return the number of a set that this rank may use, or raise."""
    number = process_set.process_set_id
    if number is None or not context.engine().is_member(number):
        state = "is not registered" if number is None else f"does not include rank {context.engine().world.rank}"
        fix = "hvd.add_process_set(process_set) on every rank" if number is None else "if process_set.included(): ..."
        raise ShoalError(f"{kind}: {process_set} {state}", fix=fix, code="H010")
    return number


def _check_tensor(kind: Kind, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        what = f"{kind} takes a tensor, got {type(tensor).__name__}"
        raise ShoalError(what, fix="hvd.broadcast_object(...) for other values", code="H017")
    is_reduced = kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
    if tensor.layout is not torch.strided or (is_reduced and tensor.is_complex()):
        what = f"{kind} takes dense real tensors, got {tensor.dtype}, {tensor.layout}"
        fix = "hvd.sparse_allreduce_async(...) for sparse tensors, torch.view_as_real(...) for complex ones"
        raise ShoalError(what, fix=fix, code="H017")
    if tensor.dim() == 0 and kind in (Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER):
        raise ShoalError(f"{kind} needs a tensor with at least 1 dim, got 0", fix="tensor.reshape(1)", code="H008")
