"""The operations that `shoal bench comm` measures: messages between ranks, and collectives by shoal and by torch.

Each can be repeated on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.bench.timings import Tier
from shoal.comm.collectives import all_gather, reduce_scatter
from shoal.comm.message_collectives import MessageCollectives

Work = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A group of ranks: those of a host, or all."""

    tier: Tier
    group: dist.ProcessGroup
    node: int | None
    hop: int
    """Distance from a rank to its neighbour: the next rank, or the rank with the same index on the next host."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()


def written(elements: int, device: torch.device) -> Tensor:
    """Allocate a tensor and write to it: pages that were never written cost nothing to read."""
    return torch.empty(max(elements, 4096), device=device).fill_(0.0)


def _exchange(group: dist.ProcessGroup, *, give: tuple[Tensor, int] | None, take: tuple[Tensor, int] | None) -> None:
    """Send one message, receive one, or both at once."""
    works = [dist.irecv(take[0], group=group, group_src=take[1])] if take else []
    works += [dist.isend(give[0], group=group, group_dst=give[1])] if give else []
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()


def pair(place: Place, x: Tensor, y: Tensor) -> Work:
    """Ping-pong between the first rank and its neighbour, while the others wait. Each direction carries half of the
    tensor, so that both together take the time of one message."""
    rank, group = dist.get_rank(place.group), place.group
    there, back = x[: x.numel() // 2], y[: x.numel() - x.numel() // 2]

    def swap() -> None:
        if rank == 0:
            _exchange(group, give=(there, place.hop), take=None)
            _exchange(group, give=None, take=(back, place.hop))
        elif rank == place.hop:
            _exchange(group, give=None, take=(there, 0))
            _exchange(group, give=(back, 0), take=None)

    return swap


def together(place: Place, x: Tensor, y: Tensor) -> Work:
    """Every rank sends to its neighbour at the same time."""
    rank, group, size = dist.get_rank(place.group), place.group, place.size
    after, before = (rank + place.hop) % size, (rank - place.hop) % size

    return lambda: _exchange(group, give=(x, after), take=(y, before))


def stepped(kind: str, over: MessageCollectives, x: Tensor) -> Work:
    """A collective by shoal's list of messages."""
    part = x[: x.numel() // over.size]
    return {
        "all_reduce": lambda: over.all_reduce(x),
        "reduce_scatter": lambda: over.reduce_scatter(x),
        "all_gather": lambda: over.all_gather(part),
        "broadcast": lambda: over.broadcast(x),
        "all_to_all": lambda: over.all_to_all(x),
    }[kind]


def builtin(kind: str, group: dist.ProcessGroup, x: Tensor, y: Tensor) -> Work:
    """A collective by torch."""
    part = x[: x.numel() // group.size()]
    return {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "reduce_scatter": lambda: reduce_scatter(x, 0, group),
        "all_gather": lambda: all_gather(part, 0, group),
        "broadcast": lambda: dist.broadcast(x, group=group, group_src=0),
        "all_to_all": lambda: dist.all_to_all_single(y, x, group=group),
    }[kind]
