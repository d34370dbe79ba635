"""What replicas send each other: torch's own collectives or lists of messages, from where the tensors are to where they
can be sent from, and counted."""

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
from shoal.comm.message_collectives import Stepped

Chosen = Algorithm | Literal["builtin"]


@dataclass
class Sent:
    """What a rank has sent, and how long it took."""

    bytes: int = 0
    """That this rank sends: of torch's own collectives, by their formula (those of a ring); else counted."""
    times: list[tuple[float, float]] = field(default_factory=list)
    """When each collective began and ended, with waiting for others."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, num_bytes: int, began: float) -> None:
        """A collective has ended."""
        with self.lock:
            self.bytes += num_bytes
            self.times.append((began, time.perf_counter()))

    def take(self) -> tuple[list[tuple[float, float]], int]:
        """Times and bytes since this was last asked."""
        with self.lock:
            taken = self.times, self.bytes
            self.bytes, self.times = 0, []
        return taken


@dataclass
class Transport:
    """The way between replicas."""

    group: dist.ProcessGroup
    """Its own, which nobody else uses: collectives may begin at any time, from another thread."""
    device: torch.device
    """From where tensors can be sent; see `Mesh.comm_device`."""
    algorithm: Chosen = "builtin"
    node: int | None = None
    """Ranks of a node, for the hierarchical one."""
    sent: Sent = field(default_factory=Sent)

    @property
    def size(self) -> int:
        """Replicas."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """Which of them this is."""
        return dist.get_rank(self.group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all, in place where it can be; returns it."""
        with self._counted(2 * (self.size - 1) * x.nbytes // self.size) as stepped:
            there = x.to(self.device)
            if stepped is None:
                dist.all_reduce(there, group=self.group)
            else:
                stepped.all_reduce(there)
        return x if there is x else x.copy_(there)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Row t of what this rank has goes to rank t; returns what all have for this one, a row each. It goes straight
        to its target, whatever the algorithm: a ring would pass on what is for others."""
        with self._counted((self.size - 1) * x.nbytes // self.size, is_stepped=False):
            there = x.to(self.device)
            arrived = torch.empty_like(there)
            if self.device.type == "cpu":  # gloo's own fills two thirds of a wire in each direction
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
        """What all have, a row each."""
        with self._counted((self.size - 1) * x.nbytes) as stepped:
            there = x.to(self.device).unsqueeze(0)
            if stepped is not None:
                arrived = stepped.all_gather(there)
            elif self.device.type == "cpu":  # as above
                arrived = there.new_empty(self.size, *x.shape)
                self._exchange(there.expand(self.size, *x.shape), arrived)
            else:
                arrived = collectives.all_gather(there, 0, self.group)
        return arrived.to(x.device)

    @contextmanager
    def _counted(self, num_bytes: int, *, is_stepped: bool = True) -> Iterator[Stepped | None]:
        began = time.perf_counter()
        stepped = None
        if self.algorithm != "builtin" and is_stepped:
            stepped = Stepped(self.group, self.algorithm, node=self.node)
        yield stepped
        self.sent.add(num_bytes if stepped is None else stepped.counted.bytes, began)
