"""Batch norm over several ranks: equal running statistics on all ranks, and statistics of the full batch.

torch has `nn.BatchNorm`, whose running statistics are those of a rank's own samples, and `nn.SyncBatchNorm`, which
needs a GPU. This file adds two things.

RunningStatistics   averages running statistics over the ranks once a step, in one small all-reduce. Every rank then
                    evaluates, saves and exports with the same numbers, without a further collective.
synchronise         makes batch norm normalise with the mean and variance of a microbatch over all ranks, on any device.

The average after each step equals an average after many steps: the update of running statistics, r ← (1 - m) r + m b,
is linear. Training does not read them, so it computes the same with and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from shoal.comm.autograd_function import differentiable_once
from shoal.comm.collectives import Group, all_gather, all_reduce
from shoal.errors import ShoalError
from shoal.numerics.precision import wide

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Map names to the batch norms of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    """Map names to the running statistics of a model. Other buffers are constants that every rank computes itself."""
    return {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] in STATISTICS}


# ---- running statistics ----------------------------------------------------------------------------------------------


@dataclass
class RunningStatistics:
    """Averages the running statistics of a rank's modules with those of the ranks that saw other samples."""

    modules: list[nn.Module]
    every_step: Group
    """The ranks that average after each step."""
    all_replicas: Group
    """The ranks that average before an evaluation: under local SGD, more than after each step."""
    _buffers: list[Tensor] = field(default_factory=list)
    """The statistics whose average is in flight."""
    _flat: Tensor | None = None
    _work: dist.Work | None = None

    def begin(self) -> None:
        """Start the average over the ranks of `every_step`."""
        self._buffers = self._found() if self.every_step is not None else []
        if self._buffers:
            self._flat = _in_float64(self._buffers)
            self._work = dist.all_reduce(self._flat, group=self.every_step, async_op=True)

    def finish(self) -> None:
        """Wait for the average, and set the statistics."""
        if self._flat is None or self.every_step is None:
            return
        if self._work is not None:
            self._work.wait()
        _set(self._buffers, self._flat / self.every_step.size())
        self._flat = self._work = None

    def agree(self) -> None:
        """Average over all replicas now. Every rank calls it."""
        if self.all_replicas is not None and (buffers := self._found()):
            _set(buffers, all_reduce(_in_float64(buffers), self.all_replicas) / self.all_replicas.size())

    def _found(self) -> list[Tensor]:
        return [buffer for module in self.modules for buffer in statistics_of(module).values()]


def _in_float64(buffers: list[Tensor]) -> Tensor:
    """Pack all numbers in one float64 tensor: then the mean of equal numbers is the same number."""
    return torch.cat([buffer.reshape(-1).double() for buffer in buffers])


@torch.no_grad()
def _set(buffers: list[Tensor], flat: Tensor) -> None:
    for buffer, mean in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        # Ranks with fewer samples may have counted fewer batches.
        buffer.copy_((mean if buffer.is_floating_point() else mean.round()).view(buffer.shape))


@contextmanager
def statistics_kept(modules: list[_NormBase]) -> Iterator[None]:
    """Leave running statistics unchanged in a forward inside: a recomputed block has already updated them."""
    tracking = [one for one in modules if one.training and one.num_batches_tracked is not None]
    before = [
        (one, one.momentum, one.num_batches_tracked.clone()) for one in tracking if one.num_batches_tracked is not None
    ]
    for one, _, _ in before:
        one.momentum = 0.0
    try:
        yield
    finally:
        for one, momentum, number in before:
            one.momentum = momentum
            assert one.num_batches_tracked is not None
            one.num_batches_tracked.copy_(number)


# ---- statistics of the whole batch -----------------------------------------------------------------------------------


@dataclass
class Sharing:
    """The ranks whose samples are normalised together."""

    group: Group
    counts: Callable[[], bool] = field(default=lambda: True)
    """Whether the microbatch has samples of this rank, and not a placeholder for none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharing:
        return self  # a copy of the model uses the same group


def synchronise(model: nn.Module, group: Group) -> Sharing:
    """Make every batch norm of a model share its statistics with a group. Names and parameters stay."""
    sharing = Sharing(group)
    for module in batch_norms(model).values():
        module.__class__ = _SYNCED[type(module)]
        module.sharing = sharing  # type: ignore[assignment]
    return sharing


def can_share(module: _BatchNorm) -> bool:
    """Whether a batch norm is torch's own, not a subclass with a forward of its own."""
    return type(module) in _SYNCED


class _Synced(_BatchNorm):
    """Batch norm with the mean and variance of all ranks' samples."""

    sharing: Sharing

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:
        """Normalize with statistics of the microbatch over all ranks; in evaluation, as torch does."""
        if not self.training or self.sharing.group is None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        normalise: Any = _Normalise.apply
        y, mean, var, count = normalise(
            input, self.weight, self.bias, self.eps, self.sharing.group, self.sharing.counts()
        )
        if self.track_running_stats and self.running_mean is not None:
            self._track(mean, var * (count / (count - 1)))
        normalised: Tensor = y
        return normalised

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.mul_(1.0 - factor).add_(new.to(running.dtype), alpha=factor)


class SyncBatchNorm1d(_Synced, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over all ranks."""


class SyncBatchNorm2d(_Synced, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over all ranks."""


class SyncBatchNorm3d(_Synced, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over all ranks."""


class SyncBatchNorm(_Synced):
    """`nn.SyncBatchNorm` on any device."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ShoalError(
                f"batch norm takes inputs of two dims or more, got {input.dim()}",
                fix="x[None] of one sample",
                code="M026",
            )


_SYNCED: dict[type[_BatchNorm], type[_Synced]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
    nn.SyncBatchNorm: SyncBatchNorm,
}


class _Normalise(torch.autograd.Function):
    """Normalise each channel (dim 1) with the mean and variance over all other dims and all ranks.

    forward    mean, sum of squared differences and number of this rank's values ─ all-gather ─▶ mean, variance of all
    backward   sum of g and of g·x̂ ─ all-reduce ─▶  dx = w/s · (g - Σg/N - x̂ · Σ(g·x̂)/N)
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any, counts: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        xw = x.to(wide(x.dtype))
        mean, var, count = _statistics(xw, group, counts=counts)
        scale = torch.rsqrt(var + eps)
        y = (xw - _as_channels(mean, x)) * _as_channels(scale, x)
        if weight is not None:
            y = y * _as_channels(weight, x)
        if bias is not None:
            y = y + _as_channels(bias, x)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.group, ctx.counts, ctx.has_bias = group, counts, bias is not None
        ctx.mark_non_differentiable(mean, var, count)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        x, weight, mean, scale, count = ctx.saved_tensors
        gradient = grads[0].to(mean.dtype)
        normal = (x.to(mean.dtype) - _as_channels(mean, x)) * _as_channels(scale, x)
        sums = torch.stack([_sum(gradient), _sum(gradient * normal)])
        total = all_reduce(sums, ctx.group) / count
        through = gradient
        if ctx.counts:  # a placeholder does not enter the statistics
            through = gradient - _as_channels(total[0], x) - normal * _as_channels(total[1], x)
        factor = scale if weight is None else scale * weight
        of_weight = sums[1].to(weight.dtype) if weight is not None else None
        of_bias = sums[0].to(weight.dtype if weight is not None else x.dtype) if ctx.has_bias else None
        return (through * _as_channels(factor, x)).to(x.dtype), of_weight, of_bias, None, None, None


def _statistics(x: Tensor, group: dist.ProcessGroup, *, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of each channel, and the number of values, over all ranks (Chan et al. 1979)."""
    size, features = (x.numel() // x.shape[1] if counts else 0), x.shape[1]
    own = x.new_zeros(2 * features + 1)
    if size:
        mean = _sum(x) / size
        own = torch.cat([mean, _sum((x - _as_channels(mean, x)) ** 2), x.new_full((1,), float(size))])
    every = all_gather(own[None], 0, group)
    means, squares, counted = every[:, :features], every[:, features:-1], every[:, -1:]
    count = counted.sum()
    if size <= 1 and count <= 1:  # other ranks need not read the device
        raise ShoalError(
            "batch norm needs more than one value per channel over all ranks, got one in this microbatch",
            fix="a larger mb= in the plan, or DataLoader(..., drop_last=True)",
            code="M012",
        )
    mean = (counted * means).sum(0) / count
    var = (squares + counted * (means - mean) ** 2).sum(0) / count
    return mean, var, count


def _sum(x: Tensor) -> Tensor:
    """Sum over all dims but that of the channels."""
    return x.sum([dim for dim in range(x.dim()) if dim != 1])


def _as_channels(values: Tensor, x: Tensor) -> Tensor:
    """Reshape one number per channel to broadcast along dim 1 of x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
