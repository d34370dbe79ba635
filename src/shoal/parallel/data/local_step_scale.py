"""The factor that corrects the mean step of replicas under an optimizer that divides by the size of gradients.

Adam divides a gradient by the root of its mean square. With W replicas, a replica's own gradient has W times the noise
variance of the full batch's gradient. So a replica divides by more, and the mean of the replicas' steps is shorter than
one model's step:

    one model     mean g / √(signal² + noise² / W)
    replicas      mean g / √(signal² + noise²)

The factor is measured. A sample of every gradient, another one in each step, is summed over all replicas uncompressed.
The factor is the root of the mean square of the replicas' samples over that of their mean, both averaged as long as
Adam averages squares. It is 1 without noise, and √W with noise alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt

import torch
import torch.distributed as dist
from torch import Tensor

SAMPLED = 1024
"""Approximate number of gradient elements in a sample."""


@dataclass
class LocalStepScale:
    """Running estimate of how much the gradients of replicas differ."""

    memory: float
    """Decay of a square per step."""
    squares: Tensor
    """Running means of squares: of the replicas' own samples, and of the mean of their samples."""
    begins_equal: bool = False
    """Whether the optimizer's squares come from gradients that were equal on all replicas, so far."""

    def factor(self, replicas: int, most: float = inf) -> Tensor:
        """Return the factor of a mean step, at most `most`; a number on the device."""
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
        """Sum over replicas whether a gradient is non-finite, and update the estimate from the sample sent with it.

        `turn`: another number in every step; `times`: the optimizer's factor of the gradients; `own`: all ranks of this
        replica."""
        numbers = picked(gradients, turn).to(self.squares) * times.to(self.squares)
        summed = torch.cat([bad.to(self.squares).view(1), numbers.square().sum().view(1), numbers])
        dist.all_reduce(summed, group=replicas)
        size = replicas.size()
        learnt = torch.stack([summed[1] / size, (summed[2:] / size).square().sum()])
        if own.size() > 1:
            dist.all_reduce(learnt, group=own)  # every rank of a replica needs the same estimate
        before = learnt[1].expand(2) if self.begins_equal else self.squares
        self.begins_equal = False
        remembered = self.memory * before + (1 - self.memory) * learnt
        self.squares = torch.where(summed[0] > 0, self.squares, remembered)
        return summed[0]


def picked(tensors: Sequence[Tensor], turn: int) -> Tensor:
    """Pick about `SAMPLED` elements of all tensors, as if they were one, with equal strides.

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
