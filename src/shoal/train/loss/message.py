"""The sum of a step's loss over all ranks. It travels beside the backward or the update; on a CPU, with other numbers.

Where the labels of a global batch need not be counted, the numbers that would travel with their count travel with the
loss: a message costs a small step on a CPU more than what it carries. Ranks on one machine need none: see `comm.board`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.shared_board import MOST_VALUES, Board


@dataclass(slots=True)
class LossMessage:
    """On its way."""

    loss: Tensor
    sums: Callable[[], list[float]] | None
    """Waits for the sums of the loss and the signals; None: the loss is summed in place."""
    work: dist.Work | None
    names: tuple[str, ...] = ()

    @classmethod
    def send(cls, loss: Tensor, signals: Mapping[str, float] | None = None, board: Board | None = None) -> LossMessage:
        """This rank's part of the loss, and numbers that are summed with it; None: the loss alone."""
        if signals is None:
            return cls(loss, None, dist.all_reduce(loss, async_op=True))
        values = [float(loss), *signals.values()]
        if board is not None and len(values) <= MOST_VALUES:
            return cls(loss, partial(board.sum, board.post(values), len(values)), None, tuple(signals))
        sent = torch.tensor(values, dtype=torch.float64)
        return cls(loss, sent.tolist, dist.all_reduce(sent, async_op=True), tuple(signals))

    def wait(self) -> tuple[Tensor, dict[str, float]]:
        """Both sums over all ranks; of a GPU, what is computed after this waits for them, and not the host."""
        if self.work is not None:
            self.work.wait()
        if self.sums is None:
            return self.loss, {}
        total, *signals = self.sums()
        return self.loss.fill_(total), dict(zip(self.names, signals, strict=True))
