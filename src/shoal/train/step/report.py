"""One step in the making, and what is known of it afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.comm.replicas.overlap import Overlap
from shoal.comm.world import HostReduction
from shoal.data.loader import Loader
from shoal.errors import ShoalError
from shoal.numerics.async_scalars import AsyncScalars
from shoal.train.loss.counting import Kind
from shoal.train.loss.message import LossMessage


@dataclass(slots=True)
class StepReport:
    """What is known of a step once it is made."""

    loss: Tensor
    """The loss of the global batch; a number on the device, not yet read."""
    grad_norm: Tensor
    """The global norm before clipping."""
    numbers: AsyncScalars
    """Both of them, on their way to the host."""
    keeps_nonfinite: bool = False
    """Whether an update is made even if a gradient is not finite."""
    note: str = ""
    """Why it was dropped, in words, once the run knows; empty for an ordinary fp16 overflow."""
    experts: Tensor | None = None
    """A row for each router of the model: how often each expert was chosen, how many choices were dropped, and the sum
    over sequences of the auxiliary loss; over the global batch, not yet read. None: there are no experts."""

    overlap: Overlap | None = None
    """How long replicas sent each other something, and how much of it was hidden; None: not measured."""

    @property
    def was_skipped(self) -> bool:
        """Whether the update was dropped because a gradient was not finite. Waits for the step to end."""
        return not self.keeps_nonfinite and not math.isfinite(self.numbers.read()[1])


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that was queued; the host has not read yet whether its gradient was finite."""

    report: StepReport
    number: int
    """Counted from 1, as in the metrics and on the progress line."""
    sums: list[Tensor]
    """The losses of this rank's microbatches."""
    norms: dict[str, Tensor]
    """Those of the gradients of this rank's parameters."""


@dataclass(frozen=True, slots=True)
class Counted:
    """How many samples and labels every global batch has, as the dataset says."""

    batch: int
    labels_per_sample: int

    @classmethod
    def of(cls, loader: Loader) -> Counted | None:
        """None: labels have to be counted in every batch."""
        return None if loader.labels_per_sample is None else cls(loader.batch, loader.labels_per_sample)

    @property
    def num_labels(self) -> int:
        """That count, of a global batch."""
        return self.batch * self.labels_per_sample

    def check(self, num_labels: float, num_samples: float) -> None:
        """Raise if a rank's share has other labels than the dataset says."""
        if num_labels != num_samples * self.labels_per_sample:
            raise ShoalError(
                f"{num_labels:g} labels of {num_samples:g} samples count, and the dataset says that"
                f" {self.labels_per_sample} of each do",
                fix="labels_per_sample = None in the dataset: they are counted then",
                code="D037",
            )


@dataclass(slots=True, kw_only=True)
class OpenStep:
    """A batch whose step has begun: its microbatches, what each weighs, and the sum over all ranks on its way.

    The weights are decided here, once, and nothing else counts: a stand-in for no sample at all weighs nothing,
    whatever its labels say.
    """

    batch: Any
    microbatches: list[Any]
    weights: list[float]
    agreed: HostReduction
    signals: tuple[str, ...]
    signals_with_loss: dict[str, float] | None = None
    """What travels with the loss, since nothing had to be counted first; None: with the count."""
    counts: bool
    offset: int
    """The place of this rank's first sample in the global batch."""
    num_own: int
    """Microbatches that are this rank's own; what comes after them is repeated for nothing."""
    is_mean_of_means: bool = False
    """Whether every microbatch counts the same, whatever it weighs. Then `agreed` has their number."""
    largest: int | None = None
    """Samples of the largest share of it; None: all shares are equal."""
    sums: list[Tensor] = field(default_factory=list)
    message: LossMessage | None = None
    """The loss, on its way."""
    index: int = -1
    has_run: bool = False
    """Whether a pipeline has run it; on most of its ranks there is no loss to report."""
    given: Any = None
    """The batch as it was given, before it was moved to the device."""
    kinds: set[Kind] = field(default_factory=set)
    """What the losses of its microbatches are; none: sums over what `weights` says."""
    deferred_counts: dict[int, Tensor] = field(default_factory=dict)
    """Over how many things each microbatch's loss is a sum, where a forward has to show it."""
    seen_shifted: list[bool] = field(default_factory=list)
    """Whether the model was seen to shift labels, in each microbatch in which that could be seen."""

    @property
    def weight(self) -> float:
        """What the microbatch at hand weighs; outside of `microbatches`, all of them."""
        return sum(self.weights) if self.index < 0 else self.weights[self.index]

    def weight_of_mean(self, number: int | None) -> float:
        """The weight of a microbatch, at least 1, where means of microbatches are averaged. `number` None: of the one
        at hand; outside of `microbatches`, one mean stands for all of them."""
        if number is None and self.index < 0:
            return max(1.0, self.weight) / self.num_own
        return max(1.0, self.weight if number is None else self.weights[number])

    def is_stand_in(self, number: int) -> bool:
        """Whether a microbatch is computed for nothing."""
        return not self.counts or number >= self.num_own

    @property
    def has_begun(self) -> bool:
        """Whether anything was added to the gradients."""
        return bool(self.sums) or self.has_run
