"""Sum a step's loss over all ranks, asynchronously; on a CPU, together with other numbers.

If the labels of a global batch need not be counted, the numbers that are usually sent with their count are sent with
the loss: in a small step a message costs more than its bytes. Ranks on one machine need none (`comm.shared_board`).
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
    """A loss that is being summed."""

    loss: Tensor
    sums: Callable[[], list[float]] | None
    """Wait for the sums of the loss and the signals; None: the loss is summed in place."""
    work: dist.Work | None
    names: tuple[str, ...] = ()

    @classmethod
    def send(cls, loss: Tensor, signals: Mapping[str, float] | None = None, board: Board | None = None) -> LossMessage:
        """Start to sum this rank's part of the loss, with further numbers; None: the loss alone."""
        if signals is None:
            return cls(loss, None, dist.all_reduce(loss, async_op=True))
        values = [float(loss), *signals.values()]
        if board is not None and len(values) <= MOST_VALUES:
            return cls(loss, partial(board.sum, board.post(values), len(values)), None, tuple(signals))
        sent = torch.tensor(values, dtype=torch.float64)
        return cls(loss, sent.tolist, dist.all_reduce(sent, async_op=True), tuple(signals))

    def wait(self) -> tuple[Tensor, dict[str, float]]:
        """Both sums over all ranks. On a GPU, later kernels wait for them, and the host does not."""
        if self.work is not None:
            self.work.wait()
        if self.sums is None:
            return self.loss, {}
        total, *signals = self.sums()
        return self.loss.fill_(total), dict(zip(self.names, signals, strict=True))
