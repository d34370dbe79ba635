"""`sync=local:H` and `sync=diloco:H`: every replica is an island that trains by itself, and they meet every H steps.

    shared weights  θ ──────────────────────────────────── θ' = θ - outer step of  mean(θ - θᵢ)
    island 0          └─ step ─ step ─ ... ─ step ─ θ₀ ──┴─ goes on from θ'
    island 1          └─ step ─ step ─ ... ─ step ─ θ₁ ──┴─ goes on from θ'

The outer step is that of SGD with Nesterov momentum. With `fragments` the weights take turns: a part of them every
H / fragments steps, so that the wire is never idle and never crowded. With `delay` what was sent is applied that many
steps later, while the islands go on; what they did meanwhile stays on top: θᵢ += θ' - (θᵢ when it was sent).

With `warmup_steps` the first steps are those of one model: islands share their gradients, as they are, and have no way
of their own yet. So what an optimizer knows of a gradient's size begins with that of the whole batch.

Between two meetings nothing is the same on all islands but the shared weights and the outer momentum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import cast

import torch
from torch import Tensor, nn

from shoal.blueprint.local_sgd import SyncSpec, check_fragments, due
from shoal.comm.compression.reduce import Average
from shoal.comm.replicas.overlap import Overlap
from shoal.errors import raise_if
from shoal.numerics.local_tensor import to_local
from shoal.parallel.data.bucket_averager import BucketAverager, CommThreads, InFlightBucket
from shoal.parallel.data.local_step_scale import LocalStepScale


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """The optimizer of the shared weights, and how they travel."""

    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    rescale: bool = True
    """Under `local`, make a mean of Adam's steps as long as one model's would be (`local_step_scale`)."""


DEFAULT_OUTER = OuterOptimizer()
MOST_OVERSHOT = 1.5
"""How far the way of several steps is stretched at most. Along some directions an island has arrived within H steps,
and what is longer than the way there goes beyond; by twice the way, it would never end."""


@dataclass
class LocalSGD:
    """What lets the replicas of a model meet every so many steps."""

    named: Mapping[str, nn.Parameter]
    lanes: CommThreads
    average: Average
    synchrony: SyncSpec
    outer: OuterOptimizer
    bucket_bytes: int
    seed: int
    kind_of: Callable[[str], object] = field(default=lambda name: None)
    """See `BucketAverager`."""
    warmup_steps: int = 0
    """How many of the first steps all islands make together. None, if they have gone their own ways before: then each
    has an optimizer of its own, and the same gradient would lead them apart for good."""
    spread: LocalStepScale | None = None
    """None: the mean of what islands did is as long as it should be."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """θ: the weights that all islands agree on."""
    momentum: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[str, Tensor] = field(default_factory=dict)
    """With a delay: what the weights were when they were last sent."""
    arrived: dict[str, Tensor] = field(default_factory=dict)
    """With a delay: the mean of θ - θᵢ, waiting for its step."""

    def __post_init__(self) -> None:
        raise_if(filter(None, [check_fragments(self.outer.fragments, self.outer.delay, self.synchrony.every)]))
        trained = {name: p for name, p in self.named.items() if p.requires_grad}
        self.fragments = [
            BucketAverager(part, self.lanes, self.average, self.bucket_bytes, self.seed, self.kind_of)
            for part in _cut(trained, self.outer.fragments)
        ]
        self._travelling: set[int] = set()
        self.waiting: dict[int, int] = {}
        """Fragments that were sent and not applied → after which step they will be."""
        self._met: dict[int, int] = {}
        self.hidden: Overlap | None = None
        self._began = 0.0
        with torch.no_grad():
            for name, parameter in trained.items():
                self.shared[name] = to_local(parameter).detach().clone()
                self.momentum[name] = torch.zeros_like(self.shared[name])
                if self.outer.delay:
                    self.sent[name] = self.shared[name].clone()
                    self.arrived[name] = torch.zeros_like(self.shared[name])

    def rescale(self, memory: float | None, like: Tensor) -> None:
        """Under `local`, from now on: an optimizer divides by squares of gradients, of which it remembers so much."""
        if memory is not None and self.synchrony.way == "local" and self.outer.rescale:
            wide = torch.promote_types(like.dtype, torch.float32)
            self.spread = LocalStepScale(memory, torch.zeros(2, dtype=wide, device=like.device))

    def share_gradients(self, step: int) -> None:
        """Among the first steps, counted from 0: give all islands the mean of their gradients."""
        if step < self.warmup_steps:
            self._began = time.perf_counter()
            for averager, load in self._loads():
                averager.begin(load, load.gradients(), step, is_exact=True)
            for averager, load in self._loads():
                unused = [parameter for parameter in load.parameters if parameter.grad is None]
                averager.hand_back(load)
                for parameter in unused:
                    if not to_local(cast(Tensor, parameter.grad)).any():  # on no island: an optimizer leaves it alone
                        parameter.grad = None
                load.flat = load.done = None

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Exchange what is due after a step, counted from 1, and apply what is due of what was exchanged."""
        if step < self.warmup_steps:
            for name, shared in self.shared.items():
                shared.copy_(to_local(self.named[name]))
        elif step == self.warmup_steps:
            self._part(step)
        else:
            self._began = time.perf_counter()
            self._exchange(step)
        self.hidden = Overlap.of(*self.lanes.sent.take(), ready=self._began)

    def _part(self, step: int) -> None:
        """After the last step that was made together: the same bits everywhere, before each goes its own way. Islands
        add up their norms each in its own order."""
        for averager, load in self._loads():
            averager.begin(load, [to_local(parameter) for parameter in load.parameters], step, is_exact=True)
        for _, load in self._loads():
            for name, parameter, mean in zip(load.names, load.parameters, load.means(), strict=True):
                self.shared[name].copy_(mean)
                to_local(parameter).copy_(mean)
            load.flat = load.done = None

    def _loads(self) -> Iterator[tuple[BucketAverager, InFlightBucket]]:
        for averager in self.fragments:
            for load in averager.loads:
                yield averager, load

    def _exchange(self, step: int) -> None:
        for fragment in [one for one, when in self.waiting.items() if when <= step]:
            self._apply(fragment)
        for fragment in due(step, self.synchrony.every, len(self.fragments)):
            if fragment in self.waiting:  # H is another one since it was sent
                self._apply(fragment)
            self._send(fragment, step)
            if not self.outer.delay:
                self._apply(fragment)

    def meet(self, step: int) -> None:
        """Exchange now what was not exchanged just now, at the end of a run, and pay what is owed, as it is: islands
        take the mean, which is no step of the outer optimizer; its momentum is that of H steps."""
        for fragment in range(len(self.fragments)):
            if fragment in self.waiting:
                self._apply(fragment)
            if self._met.get(fragment) != step or self.outer.delay or self.average.keeps_residual:
                self._send(fragment, step, pays=True)
                self._apply(fragment, takes_mean=True)

    def settle(self) -> None:
        """Wait for what is on its way, without applying it: until its step has come it is `arrived`."""
        for fragment in list(self._travelling):
            self._settle(fragment)

    def forget(self) -> None:
        """Nothing is on its way any more: another state is about to be loaded."""
        self.settle()
        self.waiting.clear()
        self._met.clear()

    @torch.no_grad()
    def _settle(self, fragment: int) -> None:
        if fragment in self._travelling:
            for load in self.fragments[fragment].loads:
                for name, mean in zip(load.names, load.means(), strict=True):
                    self.arrived[name] = mean.clone()
                load.flat = load.done = None
            self._travelling.discard(fragment)

    @torch.no_grad()
    def _send(self, fragment: int, step: int, *, pays: bool = False) -> None:
        averager = self.fragments[fragment]
        for load in averager.loads:
            own = [to_local(parameter) for parameter in load.parameters]
            away = [self.shared[name] - weight for name, weight in zip(load.names, own, strict=True)]
            if self.spread is not None:
                factor = self.spread.factor(self.lanes.size, most=inf if self.synchrony.every == 1 else MOST_OVERSHOT)
                away = [one * factor.to(one.dtype) for one in away]
            averager.begin(load, away, step, pays=pays)
            if self.outer.delay:
                for name, weight in zip(load.names, own, strict=True):
                    self.sent[name].copy_(weight)
        self._travelling.add(fragment)
        self._met[fragment] = step
        self.waiting[fragment] = step + self.outer.delay

    @torch.no_grad()
    def _apply(self, fragment: int, *, takes_mean: bool = False) -> None:
        self._settle(fragment)
        del self.waiting[fragment]
        for name, parameter in self.fragments[fragment].named.items():
            shared, momentum, away = self.shared[name], self.momentum[name], self.arrived[name]
            before = self.sent[name] if self.outer.delay else to_local(parameter)
            meanwhile = to_local(parameter) - before if self.outer.delay else None
            if takes_mean or self.synchrony.way == "local":
                shared -= away
            else:
                momentum.mul_(self.outer.momentum).add_(away)
                shared.sub_(away.add(momentum, alpha=self.outer.momentum), alpha=self.outer.lr)
            to_local(parameter).copy_(shared if meanwhile is None else shared + meanwhile)
            if self.outer.delay:
                away.zero_()
            else:
                del self.arrived[name]

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """Inside, the model has the weights that all islands agree on."""
        self.settle()
        with torch.no_grad():
            own = {name: to_local(self.named[name]).clone() for name in self.shared}
            for name, shared in self.shared.items():
                to_local(self.named[name]).copy_(shared)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, weight in own.items():
                    to_local(self.named[name]).copy_(weight)

    def close(self) -> None:
        """End the threads."""
        self.lanes.close()


def _cut(named: Mapping[str, nn.Parameter], parts: int) -> Sequence[dict[str, nn.Parameter]]:
    """The parameters in their order, in parts of about as many elements."""
    total = sum(to_local(p).numel() for p in named.values())
    found: list[dict[str, nn.Parameter]] = [{} for _ in range(parts)]
    before = 0
    for name, parameter in named.items():
        middle = before + to_local(parameter).numel() / 2
        found[min(parts - 1, int(middle * parts / max(1, total)))][name] = parameter
        before += to_local(parameter).numel()
    return found
