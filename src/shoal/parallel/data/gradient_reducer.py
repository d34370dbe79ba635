"""Average gradients over replicas with our own reducer: compressed, or by a list of messages.

Full buckets are averaged while the backward continues:

    backward   ... layer 9 ─ layer 8 ─ layer 7 ─ layer 6 ─ ... ─ layer 0 ┐ finish
    threads             └─ bucket 0 ──────── bucket 1 ─────────── bucket 2 ┴ ─ ─┘  exposed: the wait in finish

If gradients are complete only after the backward (shards, stages of a pipeline), all buckets start there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.replicas.overlap import Overlap
from shoal.comm.replicas.transport import Transport
from shoal.errors import ShoalError
from shoal.parallel.data.bucket_averager import BucketAverager, CommThreads, InFlightBucket
from shoal.parallel.data.gradient_sync import NOTHING, GradientSync


@dataclass
class GradientReducer(GradientSync):
    """What averages the gradients of a model's parameters."""

    averager: BucketAverager
    follows_backward: bool
    """Whether a gradient is complete as soon as autograd has accumulated it."""
    finds_unused: bool = False
    """Whether parameters may have no gradient, on some ranks or on all."""
    warmup_steps: int = 0
    """How many of the first steps send gradients uncompressed."""
    may_be_dropped: bool = False
    """Whether a non-finite step is dropped and training continues: then the residual is saved until that is known."""
    on_own: Callable[[str, Tensor], None] | None = None
    """Called with each gradient of this replica before it is sent."""
    step: int = 0
    """The number of the step, which seeds random numbers."""
    is_armed: bool = True
    """Whether the current backward is the step's last."""
    overlap: Overlap | None = None
    """Of the last step."""

    def __post_init__(self) -> None:
        self._hooks: list[Any] = []
        if self.follows_backward:
            for bucket in self.averager.buckets:
                for parameter in bucket.parameters:
                    hook = parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._arrived(bucket))
                    self._hooks.append(hook)
        self._clear()

    def begin_step(self, step: int) -> None:
        """What is drawn, is drawn by the number of the step."""
        self.step = step

    def microbatch(self, is_last: bool) -> AbstractContextManager[None]:
        """Buckets travel during the backward of the last microbatch only."""
        self.is_armed = is_last
        return NOTHING

    def finish_backward(self) -> None:
        """Return when all gradients are averaged."""
        ready = time.perf_counter()
        buckets = self.averager.buckets
        unused = self._unused()
        while self._begun < len(buckets):
            self._begin_next()
        for bucket in buckets:
            if self.follows_backward:
                bucket.means()
            else:
                self.averager.hand_back(bucket)
        for parameter in unused:
            parameter.grad = None
        self.overlap = Overlap.of(*self.averager.comm_threads.sent.take(), ready=ready)
        self._clear()

    @torch.no_grad()
    def commit(self, is_applied: Tensor | bool) -> None:
        """The step whose gradients were averaged last was made, or dropped."""
        for bucket in self.averager.buckets:
            bucket.commit(is_applied)

    def measured_overlap(self, step: int) -> Overlap | None:
        """Of the last step."""
        return self.overlap

    def threads(self) -> CommThreads | None:
        """The threads on which buckets travel."""
        return self.averager.comm_threads

    def close(self) -> None:
        """End the threads, and remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self.averager.comm_threads.close()

    def _unused(self) -> list[nn.Parameter]:
        """Return parameters without a gradient on any replica: the optimizer must skip them, as on one device."""
        every = [parameter for bucket in self.averager.buckets for parameter in bucket.parameters]
        if not self.follows_backward or (all(p.grad is not None for p in every) and not self.finds_unused):
            return []
        if not self.finds_unused:
            raise ShoalError(
                "every parameter must take part in the loss of a step, got some without a gradient on this replica",
                fix="--run.find_unused_parameters true, or requires_grad_(False) for what is never used",
                code="T034",
            )
        comm_threads = self.averager.comm_threads
        used = torch.tensor([float(p.grad is not None) for p in every], device=comm_threads.transports[0].device)
        comm_threads.submit(0, _sum, used).result()
        return [parameter for parameter, count in zip(every, used.tolist(), strict=True) if not count]

    def _arrived(self, bucket: InFlightBucket) -> None:
        if self.is_armed:
            if bucket.done is not None:
                raise ShoalError(
                    "a second backward before update() would change gradients that are being averaged",
                    fix="for microbatch in run.microbatches(batch): ..., which sends gradients in the last one only",
                    code="T035",
                )
            self._missing[bucket.number] -= 1
            while self._begun < len(self._missing) and self._missing[self._begun] <= 0:
                self._begin_next()  # in the same order on all ranks, whatever the order of arrival

    @torch.no_grad()
    def _begin_next(self) -> None:
        bucket = self.averager.buckets[self._begun]
        self._begun += 1
        gradients = bucket.gradients()
        if self.on_own is not None:
            for name, gradient in zip(bucket.names, gradients, strict=True):
                self.on_own(name, gradient)
        is_exact = self.step < self.warmup_steps
        if self.may_be_dropped and not is_exact:
            bucket.keep_residual()
        self.averager.begin(bucket, gradients, self.step, is_exact=is_exact)
        if self.follows_backward:
            assert bucket.flat is not None
            for parameter, piece in zip(bucket.parameters, bucket.state.pieces(bucket.flat), strict=True):
                parameter.grad = piece  # a communication thread fills it with the mean

    def _clear(self) -> None:
        buckets = self.averager.buckets
        self._begun = 0
        self._missing = [len(bucket.parameters) for bucket in buckets]
        for bucket in buckets:
            bucket.flat = bucket.done = None


def _sum(transport: Transport, x: Tensor) -> None:
    transport.all_reduce(x)
