"""Gradients averaged over replicas by a way of our own: compressed, or by a list of messages.

While the backward goes on, buckets that are full travel:

    backward   ... layer 9 ─ layer 8 ─ layer 7 ─ layer 6 ─ ... ─ layer 0 ┐ finish
    lanes               └─ bucket 0 ──────── bucket 1 ─────────── bucket 2 ┴ ─ ─┘  exposed: what finish waits for

Where gradients are whole only after the backward (shards, stages of a pipeline), all buckets begin there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.comm.hidden import Hidden
from shoal.errors import ShoalError
from shoal.numerics.pieces import local
from shoal.parallel.averager import Averager, Load


@dataclass
class Reducer:
    """What averages the gradients of a model's parameters."""

    averager: Averager
    follows_backward: bool
    """Whether a gradient is whole as soon as autograd has summed it up."""
    step: int = 0
    """The number of the step at hand, by which is drawn what is drawn."""
    is_armed: bool = True
    """Whether the backward at hand is the step's last."""
    hidden: Hidden | None = None
    """Of the last step."""

    def __post_init__(self) -> None:
        if self.follows_backward:
            for load in self.averager.loads:
                for parameter in load.parameters:
                    parameter.register_post_accumulate_grad_hook(lambda _, load=load: self._arrived(load))
        self._clear()

    def finish(self) -> None:
        """Return when all gradients are averaged."""
        ready = time.perf_counter()
        loads = self.averager.loads
        while self._begun < len(loads):
            self._begin_next()
        for load in loads:
            means = load.means()
            if not self.follows_backward:
                self._hand_back(load, means)
        self.hidden = Hidden.of(*self.averager.lanes.sent.take(), ready=ready)
        self._clear()

    def close(self) -> None:
        """End the threads."""
        self.averager.lanes.close()

    def _arrived(self, load: Load) -> None:
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
        gradients = [local(p.grad) if p.grad is not None else torch.zeros_like(local(p)) for p in load.parameters]
        self.averager.begin(load, gradients, self.step)
        if self.follows_backward:
            assert load.flat is not None
            for parameter, piece in zip(load.parameters, load.bucket.pieces(load.flat), strict=True):
                parameter.grad = piece  # which a lane fills with the mean

    @torch.no_grad()
    def _hand_back(self, load: Load, means: list[Tensor]) -> None:
        for parameter, mean in zip(load.parameters, means, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(mean)

    def _clear(self) -> None:
        loads = self.averager.loads
        self._begun = 0
        self._missing = [len(load.parameters) for load in loads]
        for load in loads:
            load.flat = load.done = None
