"""One step in the making, and what is known of it afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shoal.comm.world import HostReduction


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
    experts: Tensor | None = None
    """A row for each router of the model: how often each expert was chosen, how many choices were dropped, and the sum
    over sequences of the auxiliary loss; over the global batch, not yet read. None: there are no experts."""


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
    counts: bool
    offset: int
    """The place of this rank's first sample in the global batch."""
    num_own: int
    """Microbatches that are this rank's own; what comes after them is repeated for nothing."""
    largest: int | None = None
    """Samples of the largest share of it; None: all shares are alike."""
    sums: list[Tensor] = field(default_factory=list)
    index: int = -1
    has_run: bool = False
    """Whether a pipeline has run it; on most of its ranks there is no loss to tell."""

    @property
    def weight(self) -> float:
        """What the microbatch at hand weighs; outside of `microbatches`, all of them."""
        return sum(self.weights) if self.index < 0 else self.weights[self.index]

    @property
    def has_begun(self) -> bool:
        """Whether anything was added to the gradients."""
        return bool(self.sums) or self.has_run
