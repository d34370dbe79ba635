"""How much longer the mean step of islands has to be, under an optimizer that divides by the size of gradients.

Adam divides a gradient by the root of its mean square. An island's own has the noise of its few samples, with W islands
W times as much of it as the gradient of all samples; so it divides by more, and the mean of what islands do is shorter
than what one model would do:

    one model     mean g / √(signal² + noise² / W)
    islands       mean g / √(signal² + noise²)

By how much is measured. Some numbers of every gradient, others in each step, are summed to all islands as they are: the
squares of an island's own over those of their mean, both remembered as long as Adam remembers squares. Without noise
this is 1, and √W when there is nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

SAMPLED = 1024
"""Numbers of a gradient that are summed, about."""


@dataclass
class LocalStepScale:
    """What islands know of how far their gradients lie apart."""

    memory: float
    """What is left of a square after a step."""
    squares: Tensor
    """Of an island's own numbers, the mean over islands; and of the mean of the islands' numbers. Remembered."""
    begins_equal: bool = False
    """Whether the optimizer has learnt its squares from gradients that were the same on all islands, so far."""

    def factor(self, replicas: int, most: float = inf) -> Tensor:
        """By which a mean step is made longer, but not more than `most`; a number on the device."""
        own, of_mean = self.squares
        tiny = torch.finfo(own.dtype).tiny
        ratio = torch.where(of_mean > 0, own / of_mean.clamp_min(tiny), torch.ones_like(own))
        return ratio.sqrt().clamp(1.0, min(sqrt(replicas), most))

    def update(
        self,
        bad: Tensor,
        gradients: Sequence[Tensor],
        turn: int,
        *,
        times: Tensor,
        replicas: dist.ProcessGroup,
        own: dist.ProcessGroup,
    ) -> Tensor:
        """Sum over islands whether a gradient is not finite, and learn from what travels with that. `turn`: another one
        in every step; `times`: what the optimizer will see of the gradients; `own`: all ranks of this island."""
        numbers = picked(gradients, turn).to(self.squares) * times.to(self.squares)
        summed = torch.cat([bad.to(self.squares).view(1), numbers.square().sum().view(1), numbers])
        dist.all_reduce(summed, group=replicas)
        size = replicas.size()
        learnt = torch.stack([summed[1] / size, (summed[2:] / size).square().sum()])
        if own.size() > 1:
            dist.all_reduce(learnt, group=own)  # every rank of an island makes the same of it
        before = learnt[1].expand(2) if self.begins_equal else self.squares
        self.begins_equal = False
        remembered = self.memory * before + (1 - self.memory) * learnt
        self.squares = torch.where(summed[0] > 0, self.squares, remembered)
        return summed[0]


def picked(tensors: Sequence[Tensor], turn: int) -> Tensor:
    """About `SAMPLED` numbers of all tensors, as if they were one, with equal steps between them.

    >>> picked([torch.arange(2.0), torch.arange(2.0, 5.0)], 7).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0]
    """
    stride = max(1, ceil(sum(tensor.numel() for tensor in tensors) / SAMPLED))
    begin = turn % stride
    found = []
    for tensor in tensors:
        found.append(tensor.reshape(-1)[begin::stride])
        begin = (begin - tensor.numel()) % stride
    return torch.cat(found) if found else torch.empty(0)
