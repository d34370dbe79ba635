"""Collectives between replicas: torch's own or lists of messages, with time and bytes counted.

Tensors are copied to the device that can send them, and the result back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.blueprint.collectives.algorithms import Algorithm
from shoal.comm import collectives
from shoal.comm.message_collectives import MessageCollectives

Chosen = Algorithm | Literal["builtin"]


@dataclass
class Sent:
    """Bytes that a rank has sent, and the times of its collectives."""

    bytes: int = 0
    """Bytes that this rank sends: for torch's own collectives by formula (that of a ring), else counted."""
    times: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each collective, including the wait for other ranks."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_bytes: int, began: float) -> None:
        """Record a collective that has ended."""
        with self.lock:
            self.bytes += num_bytes
            self.times.append((began, time.perf_counter()))

    def take(self) -> tuple[list[tuple[float, float]], int]:
        """Return times and bytes since the last call."""
        with self.lock:
            taken = self.times, self.bytes
            self.bytes, self.times = 0, []
        return taken


@dataclass
class Transport:
    """A process group between replicas, with an algorithm and counters."""

    group: dist.ProcessGroup
    """Used by this transport alone: its collectives may start at any time, from another thread."""
    device: torch.device
    """The device that tensors are sent from; see `Mesh.comm_device`."""
    algorithm: Chosen = "builtin"
    node: int | None = None
    """Ranks per node, for the hierarchical algorithm."""
    sent: Sent = field(default_factory=Sent)

    @property
    def size(self) -> int:
        """Replicas."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """The index of this replica."""
        return dist.get_rank(self.group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all replicas, in place; return the tensor."""
        with self._counted(2 * (self.size - 1) * x.nbytes // self.size) as messages:
            there = x.to(self.device)
            if messages is None:
                dist.all_reduce(there, group=self.group)
            else:
                messages.all_reduce(there)
        return x if there is x else x.copy_(there)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send row t to rank t; return the rows that all ranks sent to this one. Rows go straight to their target,
        whatever the algorithm: a ring would forward rows of others."""
        with self._counted((self.size - 1) * x.nbytes // self.size, uses_algorithm=False):
            there = x.to(self.device)
            arrived = torch.empty_like(there)
            if self.device.type == "cpu":  # gloo's own uses two thirds of a link's bandwidth in each direction
                self._exchange(there, arrived)
            else:
                dist.all_to_all_single(arrived, there, group=self.group)
        return arrived.to(x.device)

    def _exchange(self, rows: Tensor, arrived: Tensor) -> None:
        others = [rank for rank in range(self.size) if rank != self.rank]
        works = [dist.irecv(arrived[rank], group=self.group, group_src=rank) for rank in others]
        works += [dist.isend(rows[rank], group=self.group, group_dst=rank) for rank in others]
        arrived[self.rank] = rows[self.rank]
        for work in works:
            assert work is not None
            work.wait()

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all replicas, one row each."""
        with self._counted((self.size - 1) * x.nbytes) as messages:
            there = x.to(self.device).unsqueeze(0)
            if messages is not None:
                arrived = messages.all_gather(there)
            elif self.device.type == "cpu":  # as above
                arrived = there.new_empty(self.size, *x.shape)
                self._exchange(there.expand(self.size, *x.shape), arrived)
            else:
                arrived = collectives.all_gather(there, 0, self.group)
        return arrived.to(x.device)

    @contextmanager
    def _counted(self, num_bytes: int, *, uses_algorithm: bool = True) -> Iterator[MessageCollectives | None]:
        began = time.perf_counter()
        messages = None
        if self.algorithm != "builtin" and uses_algorithm:
            messages = MessageCollectives(self.group, self.algorithm, node=self.node)
        yield messages
        self.sent.add(num_bytes if messages is None else messages.counted.bytes, began)
