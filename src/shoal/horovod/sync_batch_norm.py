"""Batch normalization with the mean and variance of all ranks' samples."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.horovod.basics import size
from shoal.horovod.collectives.allreduce import allreduce
from shoal.horovod.reduce_ops import Sum


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d` to `3d` over the samples of all ranks, on CPU and CUDA.

    The gradients of weight and bias are those of this rank's samples; `DistributedOptimizer` reduces them.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize; in training mode every rank has to call it."""
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or size() == 1:
            return super().forward(input)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        count = wide.new_tensor([input.numel() // input.shape[1]])
        sums = allreduce(torch.cat([wide.sum(dims), count]), op=Sum)
        mean, total = sums[:-1] / sums[-1], sums[-1]
        centered = wide - mean.view(shape)
        # A second exchange: the difference of two large sums would lose the variance of data far from zero.
        variance = allreduce(centered.square().sum(dims), op=Sum) / total
        self._track(mean.detach(), variance.detach(), total.detach())
        normal = centered * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        """Update the running statistics; the variance there is that of the population."""
        if not self.track_running_stats or not self.training:
            return
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        unbiased = variance * total / (total - 1).clamp(min=1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)
