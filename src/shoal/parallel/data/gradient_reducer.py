"""Gradients averaged over replicas by a way of our own: compressed, or by a list of messages.

While the backward goes on, buckets that are full travel:

    backward   ... layer 9 ─ layer 8 ─ layer 7 ─ layer 6 ─ ... ─ layer 0 ┐ finish
    lanes               └─ bucket 0 ──────── bucket 1 ─────────── bucket 2 ┴ ─ ─┘  exposed: what finish waits for

Where gradients are whole only after the backward (shards, stages of a pipeline), all buckets begin there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.replicas.overlap import Overlap
from shoal.comm.replicas.transport import Transport
from shoal.errors import ShoalError
from shoal.parallel.data.bucket_averager import BucketAverager, InFlightBucket


@dataclass
class GradientReducer:
    """What averages the gradients of a model's parameters."""

    averager: BucketAverager
    follows_backward: bool
    """Whether a gradient is whole as soon as autograd has summed it up."""
    finds_unused: bool = False
    """Whether parameters may be without a gradient, on some ranks or on all."""
    warmup_steps: int = 0
    """How many of the first steps send gradients as they are."""
    may_be_dropped: bool = False
    """Whether a step that is not finite is dropped, and the next one made: what is owed is kept until that is known."""
    on_own: Callable[[str, Tensor], None] | None = None
    """Called with each gradient of this replica before it is sent."""
    step: int = 0
    """The number of the step at hand, by which is drawn what is drawn."""
    is_armed: bool = True
    """Whether the backward at hand is the step's last."""
    hidden: Overlap | None = None
    """Of the last step."""

    def __post_init__(self) -> None:
        self._hooks: list[Any] = []
        if self.follows_backward:
            for load in self.averager.loads:
                for parameter in load.parameters:
                    hook = parameter.register_post_accumulate_grad_hook(lambda _, load=load: self._arrived(load))
                    self._hooks.append(hook)
        self._clear()

    def finish(self) -> None:
        """Return when all gradients are averaged."""
        ready = time.perf_counter()
        loads = self.averager.loads
        unused = self._unused()
        while self._begun < len(loads):
            self._begin_next()
        for load in loads:
            if self.follows_backward:
                load.means()
            else:
                self.averager.hand_back(load)
        for parameter in unused:
            parameter.grad = None
        self.hidden = Overlap.of(*self.averager.lanes.sent.take(), ready=ready)
        self._clear()

    @torch.no_grad()
    def judged(self, is_applied: Tensor | bool) -> None:
        """The step whose gradients were averaged last was made, or dropped."""
        for load in self.averager.loads:
            load.judged(is_applied)

    def close(self) -> None:
        """End the threads, and let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self.averager.lanes.close()

    def _unused(self) -> list[nn.Parameter]:
        """Parameters that no replica had a gradient for: an optimizer leaves them alone, as on one device."""
        every = [parameter for load in self.averager.loads for parameter in load.parameters]
        if not self.follows_backward or (all(p.grad is not None for p in every) and not self.finds_unused):
            return []
        if not self.finds_unused:
            raise ShoalError(
                "some parameters had no part in the loss of this step, and the other replicas wait for their gradients",
                fix="find_unused_parameters=True (--run.find_unused_parameters true),"
                " or requires_grad_(False) for what is never used",
            )
        lanes = self.averager.lanes
        used = torch.tensor([float(p.grad is not None) for p in every], device=lanes.transports[0].device)
        lanes.submit(0, _sum, used).result()
        return [parameter for parameter, count in zip(every, used.tolist(), strict=True) if not count]

    def _arrived(self, load: InFlightBucket) -> None:
        if self.is_armed:
            if load.done is not None:
                raise ShoalError(
                    "a second backward before update(): what is on its way to the other replicas would change under it",
                    fix="for microbatch in run.microbatches(batch): ..., which sends gradients in the last one only",
                )
            self._missing[load.number] -= 1
            while self._begun < len(self._missing) and self._missing[self._begun] <= 0:
                self._begin_next()  # in one order on all ranks, whatever the order of arrival

    @torch.no_grad()
    def _begin_next(self) -> None:
        load = self.averager.loads[self._begun]
        self._begun += 1
        gradients = load.gradients()
        if self.on_own is not None:
            for name, gradient in zip(load.names, gradients, strict=True):
                self.on_own(name, gradient)
        is_exact = self.step < self.warmup_steps
        if self.may_be_dropped and not is_exact:
            load.keep_residual()
        self.averager.begin(load, gradients, self.step, is_exact=is_exact)
        if self.follows_backward:
            assert load.flat is not None
            for parameter, piece in zip(load.parameters, load.bucket.pieces(load.flat), strict=True):
                parameter.grad = piece  # which a lane fills with the mean

    def _clear(self) -> None:
        loads = self.averager.loads
        self._begun = 0
        self._missing = [len(load.parameters) for load in loads]
        for load in loads:
            load.flat = load.done = None


def _sum(transport: Transport, x: Tensor) -> None:
    transport.all_reduce(x)
