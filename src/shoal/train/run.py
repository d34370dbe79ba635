"""`Run`: the training step, for a loop of your own and for shoal's.

One step, four microbatches, two ranks (s: loss sum, w: how many tokens count, W: their number over the global batch):

    rank 0   open [1] ── F B ── F B ── F B ── F B ┐[3]
                 └ W ──────────[2]                ├─ norm, clip, update [4]
    rank 1   open [1] ── F B ── F B ── F B ── F B ┘

[1] w is known from the data; its sum W over all ranks travels while the first forward runs.
[2] Each backward starts from  s * degree / W.  DDP averages over `degree` ranks, so the gradient is  Σ s / W.
[3] Gradients are synchronised once, during the backward of the last microbatch.
[4] The global norm is the same number on every rank, and so is everything that is decided by it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.blueprint.plan import Plan
from shoal.comm.environment import read_environment
from shoal.comm.world import HostReduction, World
from shoal.data.batch import parts, to_device
from shoal.data.deal import DealtLoader
from shoal.data.hashing import hashed
from shoal.errors import RunFailed, ShoalError
from shoal.numerics.determinism import make_deterministic
from shoal.numerics.gradients import LossScale, clip_coefficient, global_norm, gradients_of, scale_
from shoal.numerics.precision import precision_of
from shoal.parallel.compose import compose, refuse_unbuilt
from shoal.parallel.replicate import average_buffers, synchronised
from shoal.train.objective import CrossEntropy, LossFunction, MeanOf, Objective, sum_from_mean

OnNan = Literal["stop", "skip", "ignore"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What is known of a step once it is made."""

    loss: Tensor
    """The loss of the global batch; a number on the device, not yet read."""
    grad_norm: Tensor
    """The global norm before clipping."""
    was_skipped: bool
    """Whether the update was dropped because a gradient was not finite."""
    note: str = ""
    """Why, in words; empty for an ordinary fp16 overflow."""


@dataclass(slots=True)
class _OpenStep:
    """A batch whose step has begun: its microbatches, what each weighs, and the sum over all ranks on its way."""

    batch: Any
    microbatches: list[Any]
    weights: list[float]
    agreed: HostReduction
    signals: tuple[str, ...] = ()
    sums: list[Tensor] = field(default_factory=list)
    index: int = -1

    @property
    def weight(self) -> float:
        """What the microbatch at hand weighs; outside of `microbatches`, all of them."""
        return sum(self.weights) if self.index < 0 else self.weights[self.index]


class Run:
    """A rank's part in a training run.

    >>> run = shoal.Run(plan="bf16 mb=4")  # doctest: +SKIP
    >>> model, optimizer, loader = run.prepare(model, optimizer, loader)  # doctest: +SKIP
    >>> for batch in run.batches(loader):
    ...     loss = run.step(batch)  # doctest: +SKIP
    """

    def __init__(
        self,
        plan: Plan | str | Mapping[str, Any] = "auto",
        *,
        loss: LossFunction | Objective | None = None,
        seed: int = 0,
        clip: float | None = None,
        on_nan: OnNan = "stop",
        device: str = "auto",
        deterministic: bool = False,
        loss_scale: float = 65536.0,
        loss_scale_window: int = 2000,
        bucket_mb: float = 25.0,
        timeout: float = 600.0,
        world: World | None = None,
    ) -> None:
        if deterministic:
            make_deterministic()
        asked = Plan.of(plan)
        self.world = world or World.start(read_environment(os.environ), device=device, timeout=timeout)
        self.plan = asked.resolve(self.world.size)
        refuse_unbuilt(self.plan)
        self.precision = precision_of(self.plan.precision)
        self.loss_scale = LossScale(loss_scale, loss_scale_window) if self.precision.scales_loss else LossScale()
        self.objective = _objective(loss)
        self.seed, self.clip, self.on_nan, self.bucket_mb = seed, clip, on_nan, bucket_mb
        self.coordinate = self.plan.layout.data_coordinate(self.world.rank)
        self.degree = self.plan.layout.data_degree
        self.steps_done = 0
        self.signals: dict[str, float] = {}
        """Numbers that this rank adds to the next step's; their sums over all ranks come back in `agreed`."""
        self.agreed: dict[str, float] = {}
        self.report: StepReport | None = None
        """What is known of the last step."""
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._step: _OpenStep | None = None

    # ---- what a loop prepares --------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return self.world.device

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for all."""
        return self.world.is_main

    @property
    def model(self) -> nn.Module:
        """The prepared model, laid over the ranks."""
        if self._model is None:
            raise ShoalError(
                "this run has no model yet", fix="model, optimizer, loader = run.prepare(model, optimizer, loader)"
            )
        return self._model

    @property
    def module(self) -> nn.Module:
        """The model itself, as it was given: its names and its state dict are those of one device."""
        return self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model

    @property
    def optimizer(self) -> Optimizer:
        """The prepared optimizer."""
        if self._optimizer is None:
            raise ShoalError("this run has no optimizer yet", fix="model, optimizer = run.prepare(model, optimizer)")
        return self._optimizer

    def prepare(self, *things: Any) -> Any:
        """Place a model, an optimizer and loaders, in any order; returns them in that order.

        A `DataLoader`'s batch_size is the *global* batch: each rank gets its share, so the same script computes the
        same thing on any number of ranks.
        """
        prepared = tuple(self._prepare(thing) for thing in things)
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            placed = thing.to(self.device, self.precision.weight_dtype)
            self._model = compose(placed, self.plan, device=self.device, bucket_mb=self.bucket_mb)
            return self._model
        if isinstance(thing, Optimizer):
            self._optimizer = thing
            return thing
        if isinstance(thing, DataLoader):
            return DealtLoader(thing, seed=self.seed, coordinate=self.coordinate, degree=self.degree)
        raise ShoalError(
            f"prepare cannot place a {type(thing).__name__}",
            fix="give it an nn.Module, a torch Optimizer or a DataLoader; keep the rest as it is",
        )

    # ---- one step --------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """This rank's share of each global batch, on the device."""
        for batch in loader:
            counts = getattr(loader, "counts", True)
            yield self._open(batch, counts=counts).batch

    def step(self, batch: Any) -> Tensor:
        """Forward, backward and update over this rank's share of a global batch; returns the global loss."""
        for microbatch in self.microbatches(batch):
            with self.autocast():
                loss_sum = self.objective.loss_sum(self.model, microbatch)
            self._backward(loss_sum)
        return self.update().loss

    def microbatches(self, batch: Any) -> Iterator[Any]:
        """The batch in parts of `mb` samples; gradients are synchronised in the backward of the last one only."""
        step = self._step if self._step is not None and self._step.batch is batch else self._open(batch)
        last = len(step.microbatches) - 1
        for index, microbatch in enumerate(step.microbatches):
            step.index = index
            # Randomness in the model belongs to the samples, not to the rank that happens to compute them.
            place = self.coordinate * len(step.microbatches) + index
            torch.manual_seed(int(hashed(self.seed, self.steps_done, place)[0]))
            with synchronised(self.model, is_last=index == last):
                yield microbatch

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which a forward computes in the plan's precision; `step` enters it by itself."""
        return self.precision.autocast(self.device)

    def backward(self, loss: Tensor) -> None:
        """Backward of a loss that is the *mean* over the microbatch (or the batch, without accumulation) at hand."""
        if self._step is None:  # a loop that does not use `batches`: every rank's mean counts the same
            self._step = _OpenStep(None, [None], [1.0], self._agree(1.0), tuple(self.signals))
        self._backward(sum_from_mean(loss, self._step.weight))

    def update(self) -> StepReport:
        """Clip, apply the optimizer and forget the gradients; or drop the step if the gradient is not finite."""
        step = self._step
        if step is None or not step.sums:
            raise ShoalError("update() without a backward", fix="call run.backward(loss) first, or run.step(batch)")
        loss = torch.stack(step.sums).sum()
        reduction = dist.all_reduce(loss, async_op=True) if self.degree > 1 else None  # travels during the update
        gradients = gradients_of(self.module.parameters())
        norm = global_norm(gradients) / self.loss_scale.scale
        is_finite = (self.on_nan == "ignore" and not self.loss_scale.is_dynamic) or bool(torch.isfinite(norm))
        note = ""
        if is_finite:
            self._scale_gradients(gradients, norm)
            self.optimizer.step()
            self.loss_scale.succeeded()
        else:
            note = self._judge_nonfinite(step)
        self.optimizer.zero_grad(set_to_none=True)
        if reduction is not None:
            reduction.wait()
        self.steps_done += 1
        self._step = None
        self.report = StepReport(loss, norm, was_skipped=not is_finite, note=note)
        return self.report

    def _open(self, batch: Any, *, counts: bool = True) -> _OpenStep:
        """[1] Cut the batch into microbatches and send off how much this rank's share weighs."""
        cut = parts(batch, self.plan.mb)
        weights = [float(self.objective.weight(part)) if counts else 0.0 for part in cut]
        agreed = self._agree(sum(weights))
        on_device = to_device(batch, self.device)
        self._step = _OpenStep(on_device, parts(on_device, self.plan.mb), weights, agreed, tuple(self.signals))
        return self._step

    def _agree(self, weight: float) -> HostReduction:
        return self.world.all_reduce_host([weight, *self.signals.values()])

    def _backward(self, loss_sum: Tensor) -> None:
        """[2] Backward of this microbatch's part of the global loss."""
        step = self._step
        assert step is not None
        total, *signals = step.agreed.wait()
        self.agreed = dict(zip(step.signals, signals, strict=True))
        if total == 0:
            raise ShoalError(
                "not one label of this global batch counts: all are -100", fix="mask less, or enlarge --data.batch"
            )
        step.sums.append(loss_sum.detach() / total)
        (loss_sum * (self.degree / total * self.loss_scale.scale)).backward()

    def _scale_gradients(self, gradients: list[Tensor], norm: Tensor) -> None:
        """Undo the loss scale and clip, in one pass over the gradients."""
        if self.clip is not None:
            scale_(gradients, clip_coefficient(norm, self.clip) / self.loss_scale.scale)
        elif self.loss_scale.scale != 1.0:
            scale_(gradients, torch.ones_like(norm) / self.loss_scale.scale)

    def _judge_nonfinite(self, step: _OpenStep) -> str:
        """[4] Every rank is here together, because the norm is the same number everywhere."""
        if self.loss_scale.is_dynamic and not self.loss_scale.is_exhausted:
            self.loss_scale.overflowed()
            return ""
        mine = [(self.world.rank, index) for index, loss in enumerate(step.sums) if not bool(torch.isfinite(loss))]
        places = [place for rank in self.world.all_gather_object(mine) for place in rank]
        where = "; ".join(f"rank {rank}, microbatch {index}" for rank, index in places)
        text = f"step {self.steps_done}: the loss is not finite on {where}" if where else self._nonfinite_gradient()
        if self.on_nan == "stop":
            raise RunFailed(text, fix="lower --optim.lr, look at that batch, or --run.on_nan skip to drop such steps")
        return text

    def _nonfinite_gradient(self) -> str:
        bad = [n for n, p in self.module.named_parameters() if p.grad is not None and not bool(p.grad.isfinite().all())]
        return f"step {self.steps_done}: every loss is finite, but the gradient of {', '.join(bad[:3])} is not"

    # ---- evaluation and the end ------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> float:
        """The mean loss over batches that are dealt out over the ranks, each sample once; weights do not change."""
        average_buffers(self.module, degree=self.degree)
        was_training = self.module.training
        self.module.eval()
        total, weight = torch.zeros((), dtype=torch.float64, device=self.device), 0.0
        try:
            for batch in batches:
                weight += self.objective.weight(batch)
                with self.autocast():
                    total += self.objective.loss_sum(self.module, to_device(batch, self.device))
        finally:
            self.module.train(was_training)
        total_sum, total_weight = self.world.all_reduce_host([float(total), weight]).wait()
        return total_sum / total_weight if total_weight else float("nan")

    def close(self) -> None:
        """Leave the world, if this run entered it."""
        self.world.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.world.__exit__(kind, error, trace)


def _objective(loss: LossFunction | Objective | None) -> Objective:
    if loss is None:
        return CrossEntropy()
    if isinstance(loss, Callable) and not hasattr(loss, "loss_sum"):  # type: ignore[arg-type]
        return MeanOf(loss)
    return loss  # type: ignore[return-value]
