"""Tensors of a model, averaged over replicas in buckets that travel in two lanes, each with a thread and connections of
its own: while one encodes, the link is the other's.

    lane 0    encode b0 ── send ──── decode │ encode b2 ── send ──── ...
    lane 1           encode b1 ──── send ──── decode │ ...

torch's DDP has buckets of its own, whose borders move after the first step; what is owed to a gradient, and the noise
of its rounding, would move with them. These are cut once, in the reverse order of the model, which is about the order
in which a backward fills them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.averages import Average, Bucket, Seeds
from shoal.comm.wire import Sent, Wire
from shoal.data.hashing import hashed
from shoal.numerics.pieces import local


@dataclass
class Lanes:
    """Ways to the same replicas, each with a thread. What begins first in a lane on one rank has to on all."""

    wires: Sequence[Wire]
    """They count together."""

    def __post_init__(self) -> None:
        self._threads = [ThreadPoolExecutor(1, f"shoal-lane-{number}") for number in range(len(self.wires))]

    @property
    def rank(self) -> int:
        """Which replica this is."""
        return self.wires[0].rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.wires[0].size

    @property
    def sent(self) -> Sent:
        """By all lanes."""
        return self.wires[0].sent

    def submit(self, number: int, do: Callable[..., None], *arguments: Any) -> Future[None]:
        """Call with a wire, and whatever else, in the thread of a lane."""
        lane = number % len(self.wires)
        return self._threads[lane].submit(do, self.wires[lane], *arguments)

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown(wait=False)


@dataclass
class Load:
    """A bucket of a model, and what of it is on its way."""

    number: int
    names: list[str]
    parameters: list[nn.Parameter]
    bucket: Bucket
    flat: Tensor | None = None
    """What travels; the mean, when `done` is."""
    done: Future[None] | None = None

    def means(self) -> list[Tensor]:
        """What has arrived, waiting for it: a view for each tensor."""
        assert self.done is not None
        assert self.flat is not None
        self.done.result()
        return self.bucket.pieces(self.flat)


@dataclass
class Averager:
    """What averages tensors that are like a model's parameters."""

    named: Mapping[str, nn.Parameter]
    lanes: Lanes
    average: Average
    bucket_bytes: int
    seed: int
    loads: list[Load] = field(init=False)

    def __post_init__(self) -> None:
        self.loads = [
            Load(number, [name for name, _ in pairs], [p for _, p in pairs], self._new_bucket(pairs))
            for number, pairs in enumerate(self._cut())
        ]

    @torch.no_grad()
    def begin(self, load: Load, tensors: Sequence[Tensor], step: int) -> None:
        """Send off one tensor for each parameter of a bucket. They are copied first."""
        flat = load.flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        place = (self.seed, step, load.number)
        seeds = Seeds(int(hashed(*place)[0]), int(hashed(*place, self.lanes.rank + 1)[0]))
        packed = torch.cuda.current_stream().record_event() if flat.is_cuda else None
        load.done = self.lanes.submit(load.number, self._travel, load.bucket, flat, seeds, packed)

    @torch.no_grad()
    def _travel(self, wire: Wire, bucket: Bucket, flat: Tensor, seeds: Seeds, packed: torch.cuda.Event | None) -> None:
        if packed is None:
            self.average(flat, bucket, wire, seeds)
            return
        with torch.cuda.device(flat.device):  # a thread begins with the first device
            packed.wait()
            self.average(flat, bucket, wire, seeds)
            torch.cuda.current_stream().synchronize()

    def residuals(self) -> Iterator[tuple[str, Tensor]]:
        """What is owed to each tensor, in its place; nothing, if everything travels."""
        for load in self.loads:
            if load.bucket.residual is not None:
                yield from zip(load.names, load.bucket.pieces(load.bucket.residual), strict=True)

    def narrow(self) -> Iterator[tuple[str, Tensor]]:
        """The narrow matrices that the next step begins with (PowerSGD)."""
        for load in self.loads:
            for name, matrix in zip(load.names, load.bucket.narrow, strict=False):
                if matrix is not None:
                    yield name, matrix

    def _cut(self) -> Iterator[list[tuple[str, nn.Parameter]]]:
        """The parameters from the last to the first, in buckets of one type."""
        bucket: list[tuple[str, nn.Parameter]] = []
        size = 0
        for name, parameter in reversed(list(self.named.items())):
            own = local(parameter)
            if not parameter.requires_grad or not own.numel():
                continue
            if bucket and (size + own.nbytes > self.bucket_bytes or own.dtype != local(bucket[0][1]).dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append((name, parameter))
            size += own.nbytes
        if bucket:
            yield bucket

    def _new_bucket(self, pairs: list[tuple[str, nn.Parameter]]) -> Bucket:
        pieces = [local(parameter) for _, parameter in pairs]
        seeds = [int(hashed(self.seed, *name.encode())[0]) for name, _ in pairs]
        return self.average.new_bucket([tuple(p.shape) for p in pieces], pieces[0].dtype, pieces[0].device, seeds)


def make_equal(module: nn.Module, wire: Wire) -> None:
    """Give all replicas the tensors of the first, whatever each was made with."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            there = tensor.detach().to(wire.device)
            dist.broadcast(there, group=wire.group, group_src=0)
            tensor.copy_(there)
