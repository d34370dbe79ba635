"""Combine the losses of an evaluation's batches to one mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.train.loss.counting import Kind, Loss, are_alike, evidence_of
from shoal.train.loss.deferred_count import PAIR_FIX, uncounted
from shoal.train.loss.objective import sum_from_mean


@dataclass
class Tally:
    """Sums over this rank's batches, by the loss function's counts and by the counts of the data."""

    device: torch.device
    sums: list[Tensor] = field(init=False)
    """Sums of losses weighted by the data, of losses weighted by their counts, and of counts."""
    weight: float = 0.0
    kinds: dict[Kind | None, int] = field(default_factory=dict)
    """Number of batches of each kind."""
    evidence: list[float] = field(default_factory=lambda: [0.0] * 3)

    def __post_init__(self) -> None:
        self.sums = [torch.zeros((), dtype=torch.float64, device=self.device) for _ in range(3)]

    def add(self, loss: Tensor | Loss, given: Any, weight: float) -> None:
        """Add one batch; `given` is the batch before it was moved to the device."""
        if isinstance(loss, Tensor):
            self._count(None)
            self.sums[0] += loss
        else:
            self._count(loss.kind)
            if loss.count is not None:
                self.sums[1] += loss.total
                self.sums[2] += loss.count
            if loss.kind is not Kind.PAIR:
                self.sums[0] += sum_from_mean(loss.value, weight)
                self.evidence = [a + b for a, b in zip(self.evidence, evidence_of(given).numbers, strict=True)]
        self.weight += weight

    def _count(self, kind: Kind | None) -> None:
        self.kinds[kind] = self.kinds.get(kind, 0) + 1

    def mean(self, world: World, *, is_owner_of_loss: bool) -> float:
        """The mean over all ranks; every rank calls it. Of ranks with the same losses, one adds them (`is_teller`)."""
        kinds = [float(self.kinds.get(kind, 0)) for kind in (None, *Kind)]
        mine = [*(float(one) for one in self.sums), self.weight, *self.evidence, *kinds]
        sums = world.all_reduce_host(mine if is_owner_of_loss else [0.0] * len(mine)).wait()
        by_data, by_count, count, weight, *rest = sums
        num_ragged, elements, squares, _, mean, total, counted, pair = rest
        if not mean + total and (counted or pair):
            return by_count / count if count else float("nan")
        if total and total + mean + counted + pair > 1:
            raise ShoalError(
                "the loss function returned the sum over a batch, and there are several", fix=PAIR_FIX, code="T017"
            )
        if mean and mean + counted > 1 and not are_alike(num_ragged, elements, squares, mean + counted):
            raise uncounted("batches of this evaluation are not alike")
        return by_data / weight if weight else float("nan")
