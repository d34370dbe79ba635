"""Average tensors of a model over replicas in buckets, with two communication threads.

Each thread has its own connections. While one encodes a bucket, the other uses the link:

    thread 0    encode b0 ── send ──── decode │ encode b2 ── send ──── ...
    thread 1           encode b1 ──── send ──── decode │ ...
         [1] pack  [2] submit in bucket order  [3] average on a stream of its own  [4] wait in `means`

torch's DDP moves the borders of its buckets after the first step. The residual of a gradient, and the noise of its
rounding, would move with them. These buckets are cut once, in the reverse order of the model, which is about the order
in which a backward fills them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.comm.compression.gradient_compression import AllReduce, Average, Bucket, Seeds
from shoal.comm.group_lifetime import note_thread
from shoal.comm.profile.timer import enter, waiting
from shoal.comm.replicas.transport import Sent, Transport
from shoal.hash_rng import hashed_number
from shoal.numerics.local_tensor import gradient_of, to_local


@dataclass
class CommThreads:
    """Transports to the same replicas, each with a thread. All ranks must submit to a thread in the same order."""

    transports: Sequence[Transport]
    """They share one `Sent`."""
    why: str = ""
    """Why this algorithm was chosen."""

    def __post_init__(self) -> None:
        self._threads = [_CommThread(transport) for transport in self.transports]

    @property
    def rank(self) -> int:
        """The index of this replica."""
        return self.transports[0].rank

    @property
    def size(self) -> int:
        """The number of replicas."""
        return self.transports[0].size

    @property
    def sent(self) -> Sent:
        """Bytes and times of all threads."""
        return self.transports[0].sent

    def submit(self, number: int, do: Callable[..., None], *arguments: Any) -> Future[None]:
        """Call `do` with a transport and the arguments in one of the threads."""
        return self._threads[number % len(self._threads)].submit(do, *arguments)

    def close(self) -> None:
        """End the threads after their queued work."""
        for thread in self._threads:
            thread.close()


class _CommThread:
    """One daemon thread: a process that fails while a peer is late must not wait for it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._calls: queue.SimpleQueue[tuple[Future[None], Callable[..., None], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        thread = threading.Thread(target=self._work, name="shoal-comm", daemon=True)
        note_thread(thread)
        thread.start()

    def submit(self, do: Callable[..., None], *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        self._calls.put((done, do, arguments))
        return done

    def close(self) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            done, do, arguments = call
            try:
                do(self.transport, *arguments)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)


@dataclass
class InFlightBucket:
    """A bucket of a model's parameters, and its average in flight."""

    number: int
    seed: int
    """Hash of its first tensor's name: the same on every layout."""
    names: list[str]
    parameters: list[nn.Parameter]
    state: Bucket
    flat: Tensor | None = None
    """The data in flight; the mean, once `done` is."""
    done: Future[None] | None = None
    key: str | None = None
    """The name of this average in a profile."""
    before: Tensor | None = None
    """The residual before the step; None: not saved."""

    def keep_residual(self) -> None:
        """Save the residual, for a step that may be dropped."""
        residual = self.state.residual
        self.before = residual.clone() if residual is not None else None

    def commit(self, is_applied: Tensor | bool) -> None:
        """Keep the new residual if the step was applied, else restore the saved one. `is_applied` may be a number on
        the device."""
        before, residual, self.before = self.before, self.state.residual, None
        if before is None or residual is None or is_applied is True:
            return
        was_made = torch.as_tensor(is_applied, device=residual.device) > 0
        residual.copy_(torch.where(was_made, residual, before))

    def gradients(self) -> list[Tensor]:
        """Return this replica's gradients; zeros where there is none."""
        return [gradient_of(parameter) for parameter in self.parameters]

    def means(self) -> list[Tensor]:
        """[4] Wait for the average; return a view for each tensor."""
        assert self.done is not None
        assert self.flat is not None
        with waiting("dp_replicate", self.key):
            self.done.result()
        return self.state.pieces(self.flat)


@dataclass
class BucketAverager:
    """Averages tensors that have the shapes of a model's parameters."""

    named: Mapping[str, nn.Parameter]
    comm_threads: CommThreads
    average: Average
    bucket_bytes: int
    seed: int
    kind_of: Callable[[str], object] = field(default=lambda name: None)
    """Parameters of different kinds are never encoded together. The mean of a parameter that other ranks also have must
    be the same there, and must not depend on neighbours that differ."""
    buckets: list[InFlightBucket] = field(init=False)

    def __post_init__(self) -> None:
        self.buckets = [
            InFlightBucket(
                number, _seed(pairs[0][0]), [name for name, _ in pairs], [p for _, p in pairs], self._new_bucket(pairs)
            )
            for number, pairs in enumerate(self._cut())
        ]

    @torch.no_grad()
    def begin(
        self,
        bucket: InFlightBucket,
        tensors: Sequence[Tensor],
        step: int,
        *,
        is_exact: bool = False,
        flush: bool = False,
    ) -> None:
        """Start to average one tensor per parameter of a bucket, from a copy.

        `is_exact`: uncompressed. `flush`: uncompressed and with the residual, which becomes zero.
        """
        flat = bucket.flat = torch.cat([tensor.reshape(-1) for tensor in tensors])  # [1]
        if flush and bucket.state.residual is not None:
            flat += bucket.state.residual
            bucket.state.residual.zero_()
        # Seeds depend on the bucket's name, not on its number: so a layout with other buckets draws the same noise.
        place = (self.seed, step, bucket.seed)
        seeds = Seeds(hashed_number(*place), hashed_number(*place, self.comm_threads.rank + 1))
        packed = (
            torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
        )  # the thread waits for it
        average = AllReduce() if is_exact or flush else self.average
        bucket.key = enter(f"bucket {self.comm_threads.transports[0].group.group_name}")
        bucket.done = self.comm_threads.submit(bucket.number, _travel, average, bucket.state, flat, seeds, packed)

    @torch.no_grad()
    def hand_back(self, bucket: InFlightBucket) -> None:
        """Wait for the average, and make it the gradients of the bucket's parameters."""
        for parameter, mean in zip(bucket.parameters, bucket.means(), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            to_local(parameter.grad).copy_(mean)

    def residuals(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the residual of each tensor; none, if the method has none."""
        for bucket in self.buckets:
            if bucket.state.residual is not None:
                yield from zip(bucket.names, bucket.state.pieces(bucket.state.residual), strict=True)

    def q_factors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the factors Q that the next step of PowerSGD starts with."""
        for bucket in self.buckets:
            for name, matrix in zip(bucket.names, bucket.state.q_factors, strict=False):
                if matrix is not None:
                    yield name, matrix

    def _cut(self) -> Iterator[list[tuple[str, nn.Parameter]]]:
        """Yield parameters from the last to the first, in buckets of one dtype and one kind."""
        open_ones: dict[object, list[tuple[str, nn.Parameter]]] = {}
        sizes: dict[object, int] = {}
        for name, parameter in reversed(list(self.named.items())):
            own = to_local(parameter)
            if not parameter.requires_grad or not own.numel():
                continue
            kind = (own.dtype, self.kind_of(name))
            if kind in open_ones and sizes[kind] + own.nbytes > self.bucket_bytes:
                yield open_ones.pop(kind)
                sizes[kind] = 0
            open_ones.setdefault(kind, []).append((name, parameter))
            sizes[kind] = sizes.get(kind, 0) + own.nbytes
        yield from open_ones.values()

    def _new_bucket(self, pairs: list[tuple[str, nn.Parameter]]) -> Bucket:
        pieces = [to_local(parameter) for _, parameter in pairs]
        seeds = [hashed_number(self.seed, *name.encode()) for name, _ in pairs]
        return self.average.new_bucket([tuple(p.shape) for p in pieces], pieces[0].dtype, pieces[0].device, seeds)


@torch.no_grad()
def _travel(
    transport: Transport, average: Average, bucket: Bucket, flat: Tensor, seeds: Seeds, packed: torch.cuda.Event | None
) -> None:
    """[3] Average in a communication thread."""
    if packed is None:
        average(flat, bucket, transport, seeds)
        return
    # A separate stream: on that of the backward, communication would wait for computation that is already queued.
    stream = torch.cuda.Stream(flat.device)
    with torch.cuda.stream(stream):
        packed.wait(stream)
        average(flat, bucket, transport, seeds)
        stream.synchronize()


def _seed(name: str) -> int:
    return hashed_number(*name.encode()) >> 1


def make_equal(module: nn.Module, transport: Transport) -> None:
    """Broadcast the tensors of the first replica to all."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            there = tensor.detach().to(transport.device).contiguous()
            dist.broadcast(there, group=transport.group, group_src=0)
            tensor.copy_(there)
