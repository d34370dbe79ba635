"""`sync=local:H` and `sync=diloco:H`: local SGD. Replicas train independently and exchange weights every H steps.

    shared weights  θ ──────────────────────────────────── θ' = θ - outer step of  mean(θ - θᵢ)
    replica 0         └─ step ─ step ─ ... ─ step ─ θ₀ ──┴─ continues from θ'
    replica 1         └─ step ─ step ─ ... ─ step ─ θ₁ ──┴─ continues from θ'

The outer step is SGD with Nesterov momentum. With `fragments` the weights take turns: a part of them is exchanged every
H / fragments steps, which spreads the traffic evenly. With `delay` an exchange is applied that many steps later, while
the replicas continue; their steps in between are kept: θᵢ += θ' - (θᵢ when it was sent).

With `warmup_steps` the first steps are those of one model: replicas average their gradients, uncompressed. So the
optimizer's estimate of a gradient's size starts with that of the full batch.

Between two exchanges only the shared weights and the outer momentum are the same on all replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal.blueprint.replicas.sync_words import SyncSpec, check_fragments, due
from shoal.comm.compression.gradient_compression import Average
from shoal.comm.mesh import Mesh
from shoal.comm.replicas.overlap import Overlap
from shoal.config.checks.arguments import BOTH, check_choice, check_number, check_whole
from shoal.errors import Problem, raise_if
from shoal.numerics.local_tensor import gradient_of, to_local
from shoal.parallel.data.bucket_averager import BucketAverager, CommThreads, InFlightBucket
from shoal.parallel.data.gradient_sync import GradientSync
from shoal.parallel.data.local_step_scale import LocalStepScale


@dataclass(frozen=True, slots=True)
class OuterOptimizer:
    """The optimizer of the shared weights under `sync=`, and how they are exchanged.

    lr, momentum  under `sync=diloco:H`, of SGD with Nesterov momentum on the mean change of the replicas in H steps
    fragments     parts of the weights, which are exchanged one after the other within H steps
    delay         steps between sending and applying an exchange, during which training continues
    rescale       under `sync=local:H`, make the mean of Adam's steps as long as one model's would be

        run = shoal.Run("dp_replicate=4 sync=diloco:50", outer=shoal.OuterOptimizer(lr=0.7, momentum=0.9))
    """

    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    rescale: bool = True

    def problems(self) -> Iterator[Problem]:
        """Find values that no optimizer can have. `sync=` bounds fragments and delay further."""
        found = [
            *check_number("lr", self.lr, above=0, usual=0.7),
            *check_number("momentum", self.momentum, least=0, most=0.999999, usual=0.9),
            *check_whole("fragments", self.fragments, least=1, usual=1),
            *check_whole("delay", self.delay, least=0, usual=0),
            *check_choice("rescale", self.rescale, BOTH),
        ]
        for problem in found:
            yield replace(problem.within("outer"), fix=f"outer=shoal.OuterOptimizer({problem.fix})")


DEFAULT_OUTER = OuterOptimizer()
MOST_OVERSHOT = 1.5
"""Maximum factor for several steps. Along some directions a replica has converged within H steps, and a longer step
overshoots; with a factor of two it would oscillate for ever."""


@dataclass
class LocalSGD(GradientSync):
    """Local SGD and DiLoCo: the replicas of a model exchange weights every H steps."""

    named: Mapping[str, nn.Parameter]
    comm_threads: CommThreads
    average: Average
    sync: SyncSpec
    outer: OuterOptimizer
    bucket_bytes: int
    seed: int
    kind_of: Callable[[str], object] = field(default=lambda name: None)
    """See `BucketAverager`."""
    warmup_steps: int = 0
    """How many of the first steps all replicas make together. 0, if they have already diverged: then each has its own
    optimizer state, and the same gradient would move them apart for good."""
    step_scale: LocalStepScale | None = None
    """None: the mean of the replicas' steps needs no factor."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """θ: the weights that all replicas agree on."""
    momentum: dict[str, Tensor] = field(default_factory=dict)
    sent: dict[str, Tensor] = field(default_factory=dict)
    """With a delay: the weights when they were last sent."""
    arrived: dict[str, Tensor] = field(default_factory=dict)
    """With a delay: the mean of θ - θᵢ, until it is applied."""

    def __post_init__(self) -> None:
        raise_if(check_fragments(self.outer.fragments, self.outer.delay, self.sync.every))
        trained = {name: p for name, p in self.named.items() if p.requires_grad}
        self.fragments = [
            BucketAverager(part, self.comm_threads, self.average, self.bucket_bytes, self.seed, self.kind_of)
            for part in _cut(trained, self.outer.fragments)
        ]
        self._travelling: set[int] = set()
        self.waiting: dict[int, int] = {}
        """Fragments that were sent and not applied → the step after which they will be."""
        self._exchanged_at: dict[int, int] = {}
        self.overlap: Overlap | None = None
        self._began = 0.0
        with torch.no_grad():
            for name, parameter in trained.items():
                self.shared[name] = to_local(parameter).detach().clone()
                self.momentum[name] = torch.zeros_like(self.shared[name])
                if self.outer.delay:
                    self.sent[name] = self.shared[name].clone()
                    self.arrived[name] = torch.zeros_like(self.shared[name])

    def rescale(self, memory: float | None, like: Tensor) -> None:
        """Under `local`, correct the step length from now on. `memory` is the optimizer's decay of squared
        gradients."""
        if memory is not None and self.sync.way == "local" and self.outer.rescale:
            wide = torch.promote_types(like.dtype, torch.float32)
            self.step_scale = LocalStepScale(memory, torch.zeros(2, dtype=wide, device=like.device))

    def finish_gradients(self, step: int) -> None:
        """Among the first steps, counted from 0: give all replicas the mean of their gradients."""
        if step < self.warmup_steps:
            self._began = time.perf_counter()
            for averager, bucket in self._buckets():
                averager.begin(bucket, bucket.gradients(), step, is_exact=True)
            for averager, bucket in self._buckets():
                unused = [parameter for parameter in bucket.parameters if parameter.grad is None]
                averager.hand_back(bucket)
                for parameter in unused:
                    if not to_local(cast(Tensor, parameter.grad)).any():  # on no replica: the optimizer must skip it
                        parameter.grad = None
                bucket.flat = bucket.done = None

    def norm_group(self, mesh: Mesh) -> dist.ProcessGroup:
        """A replica clips by its own norm."""
        return mesh.group("replica")

    def agree_on_norm(self, norm: Tensor, mesh: Mesh, *, step: int, scale: float, clip: float | None) -> Tensor:
        """Replicas have their own norms; but if one is not finite, none is: whatever is decided by that,
        all decide alike. They compare gradients as an optimizer sees them, without `scale` and clipped."""
        if self.keeps_nonfinite and self.step_scale is None:  # a message less in every step
            return norm
        bad = (~norm.isfinite()).to(norm.dtype)
        between = mesh.group("dp_replicate")
        if self.step_scale is None:
            dist.all_reduce(bad, group=between)
        else:
            own = [gradient_of(parameter) for parameter in self.named.values() if parameter.requires_grad]
            seen = torch.full_like(norm, 1 / scale)
            if clip is not None:
                seen *= (clip * scale / (norm + 1e-6)).clamp_max(1.0)
            bad = self.step_scale.update(bad, own, step, times=seen, replicas=between, own=mesh.group("replica"))
        return torch.where(bad > 0, torch.full_like(norm, torch.nan), norm)

    @torch.no_grad()
    def end_step(self, steps_done: int) -> None:
        """Exchange what is due after a step, and apply what is due of what was exchanged."""
        if steps_done < self.warmup_steps:
            for name, shared in self.shared.items():
                shared.copy_(to_local(self.named[name]))
        elif steps_done == self.warmup_steps:
            self._part(steps_done)
        else:
            self._began = time.perf_counter()
            self._exchange(steps_done)
        self.overlap = Overlap.of(*self.comm_threads.sent.take(), ready=self._began)

    def _part(self, step: int) -> None:
        """After the last warm-up step, make all replicas equal bit for bit. Each sums its norms in its own order, so
        they may differ in the last bits."""
        for averager, bucket in self._buckets():
            averager.begin(bucket, [to_local(parameter) for parameter in bucket.parameters], step, is_exact=True)
        for _, bucket in self._buckets():
            for name, parameter, mean in zip(bucket.names, bucket.parameters, bucket.means(), strict=True):
                self.shared[name].copy_(mean)
                to_local(parameter).copy_(mean)
            bucket.flat = bucket.done = None

    def _buckets(self) -> Iterator[tuple[BucketAverager, InFlightBucket]]:
        for averager in self.fragments:
            for bucket in averager.buckets:
                yield averager, bucket

    def _exchange(self, step: int) -> None:
        for fragment in [one for one, when in self.waiting.items() if when <= step]:
            self._apply(fragment)
        for fragment in due(step, self.sync.every, len(self.fragments)):
            if fragment in self.waiting:  # H has changed since it was sent
                self._apply(fragment)
            self._send(fragment, step)
            if not self.outer.delay:
                self._apply(fragment)

    def exchange_all(self, step: int) -> None:
        """At the end of a run, exchange everything that has changed, and flush residuals. Replicas take the mean,
        without a step of the outer optimizer, whose momentum is that of H steps."""
        for fragment in range(len(self.fragments)):
            if fragment in self.waiting:
                self._apply(fragment)
            if self._exchanged_at.get(fragment) != step or self.outer.delay or self.average.keeps_residual:
                self._send(fragment, step, flush=True)
                self._apply(fragment, takes_mean=True)

    def synchronize(self) -> None:
        """Wait for exchanges in flight, without applying them: they are `arrived` until their step."""
        for fragment in list(self._travelling):
            self._synchronize(fragment)

    def forget(self) -> None:
        """Discard exchanges in flight: another state is about to be loaded."""
        self.synchronize()
        self.waiting.clear()
        self._exchanged_at.clear()

    @torch.no_grad()
    def _synchronize(self, fragment: int) -> None:
        if fragment in self._travelling:
            for bucket in self.fragments[fragment].buckets:
                for name, mean in zip(bucket.names, bucket.means(), strict=True):
                    self.arrived[name] = mean.clone()
                bucket.flat = bucket.done = None
            self._travelling.discard(fragment)

    @torch.no_grad()
    def _send(self, fragment: int, step: int, *, flush: bool = False) -> None:
        averager = self.fragments[fragment]
        for bucket in averager.buckets:
            own = [to_local(parameter) for parameter in bucket.parameters]
            away = [self.shared[name] - weight for name, weight in zip(bucket.names, own, strict=True)]
            if self.step_scale is not None:
                factor = self.step_scale.factor(
                    self.comm_threads.size, most=inf if self.sync.every == 1 else MOST_OVERSHOT
                )
                away = [one * factor.to(one.dtype) for one in away]
            averager.begin(bucket, away, step, flush=flush)
            if self.outer.delay:
                for name, weight in zip(bucket.names, own, strict=True):
                    self.sent[name].copy_(weight)
        self._travelling.add(fragment)
        self._exchanged_at[fragment] = step
        self.waiting[fragment] = step + self.outer.delay

    @torch.no_grad()
    def _apply(self, fragment: int, *, takes_mean: bool = False) -> None:
        self._synchronize(fragment)
        del self.waiting[fragment]
        for name, parameter in self.fragments[fragment].named.items():
            shared, momentum, away = self.shared[name], self.momentum[name], self.arrived[name]
            before = self.sent[name] if self.outer.delay else to_local(parameter)
            meanwhile = to_local(parameter) - before if self.outer.delay else None
            if takes_mean or self.sync.way == "local":
                shared -= away
            else:
                momentum.mul_(self.outer.momentum).add_(away)
                shared.sub_(away.add(momentum, alpha=self.outer.momentum), alpha=self.outer.lr)
            to_local(parameter).copy_(shared if meanwhile is None else shared + meanwhile)
            if self.outer.delay:
                away.zero_()
            else:
                del self.arrived[name]

    def measured_overlap(self, step: int) -> Overlap | None:
        """Of the last exchange."""
        return self.overlap

    def threads(self) -> CommThreads | None:
        """The threads on which weights travel."""
        return self.comm_threads

    def shared_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that all replicas agree on."""
        return self._shared_weights()

    @contextmanager
    def _shared_weights(self) -> Iterator[None]:
        self.synchronize()
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
        self.comm_threads.close()


def _cut(named: Mapping[str, nn.Parameter], parts: int) -> Sequence[dict[str, nn.Parameter]]:
    """Divide the parameters, in their order, into parts of about equal size."""
    total = sum(to_local(p).numel() for p in named.values())
    found: list[dict[str, nn.Parameter]] = [{} for _ in range(parts)]
    before = 0
    for name, parameter in named.items():
        middle = before + to_local(parameter).numel() / 2
        found[min(parts - 1, int(middle * parts / max(1, total)))][name] = parameter
        before += to_local(parameter).numel()
    return found
