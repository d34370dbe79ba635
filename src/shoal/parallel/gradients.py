"""Gradients of the pieces that a rank holds, between the last backward and the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.mesh import Mesh
from shoal.numerics.gradients import global_norm, gradients_of, norms_of
from shoal.numerics.local_tensor import to_local
from shoal.numerics.precision import wide
from shoal.parallel.pipeline.pipeline import Pipeline


def local_gradients(named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The gradients that there are, by name; of a sharded parameter, this rank's piece."""
    return {name: to_local(p.grad) for name, p in named.items() if p.grad is not None}


def sum_tied(
    first: nn.Parameter | None, second: nn.Parameter | None, pipeline: Pipeline, comm_device: torch.device
) -> None:
    """Give both copies of a tied parameter the sum of their gradients, whether both are here or on two ranks."""
    here = [to_local(p.grad) if p is not None and p.grad is not None else None for p in (first, second)]
    if here[0] is not None and here[1] is not None:
        here[1] += here[0]
        here[0].copy_(here[1])
    elif here[0] is not None:
        _add_other_copy(here[0], pipeline.owners[-1], pipeline, comm_device)
    elif here[1] is not None:
        _add_other_copy(here[1], pipeline.owners[0], pipeline, comm_device)


def _add_other_copy(gradient: Tensor, owner: int, pipeline: Pipeline, comm_device: torch.device) -> None:
    theirs = torch.empty_like(gradient, device=comm_device)
    own = gradient.to(comm_device).contiguous()
    send = dist.P2POp(dist.isend, own, group=pipeline.group, group_peer=owner)
    receive = dist.P2POp(dist.irecv, theirs, group=pipeline.group, group_peer=owner)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    gradient += theirs.to(gradient.device)


def own_norms(named: Mapping[str, nn.Parameter], parameters: Collection[nn.Parameter]) -> dict[str, Tensor]:
    """The norm of each gradient of `parameters` that this rank holds, pieces as they are, by name."""
    chosen = {id(p) for p in parameters}  # of a tensor, a hash is a call of Python, and this is done in every step
    found = local_gradients({name: p for name, p in named.items() if id(p) in chosen})
    return dict(zip(found, norms_of(list(found.values())), strict=True))


def norm_of_whole(
    norms: Mapping[str, Tensor], named: Mapping[str, nn.Parameter], parameters: Iterable[nn.Parameter], mesh: Mesh
) -> Tensor:
    """The global norm where this rank holds all of every parameter, also of those that are not the model's."""
    own = {id(p) for p in named.values()}
    every = [*norms.values(), *norms_of(gradients_of(p for p in parameters if id(p) not in own))]
    return global_norm(every) if every else _zero(named, mesh)


def norm_of_pieces(
    counted: list[Tensor],
    named: Mapping[str, nn.Parameter],
    mesh: Mesh,
    group: dist.ProcessGroup | None,
    zero_sum: float | None = None,
) -> tuple[Tensor, bool | None]:
    """The global norm over the pieces of all ranks of a group; None: of all ranks. `counted`: norms of those pieces of
    this rank that no rank before it counts.

    `zero_sum`: a number whose sum over all ranks has to be 0. Returned as well is whether it was; None where a device
    knows it and the host would have to wait: then the norm is NaN if it was not, so that no update is made.
    """
    square = global_norm(counted).to(mesh.device) ** 2 if counted else _zero(named, mesh)
    if zero_sum is None:
        dist.all_reduce(square, group=group)
        return square.sqrt(), None
    numbers = torch.full((2,), zero_sum, dtype=torch.float64, device=mesh.device)
    numbers[0] = square
    dist.all_reduce(numbers, group=group)
    norm = numbers[0].sqrt().to(square.dtype)
    if mesh.device.type == "cpu":
        return norm, float(numbers[1]) == 0.0
    return torch.where(numbers[1] == 0, norm, torch.nan), None


def _zero(named: Mapping[str, nn.Parameter], mesh: Mesh) -> Tensor:
    dtype = wide(next(iter(named.values())).dtype)
    return torch.zeros((), dtype=dtype, device=mesh.device)
