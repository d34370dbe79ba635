"""Collectives with a gradient: the backward of each is the collective that is its transpose.

             forward                                   backward
enter        identity                                  sum over the group
leave        sum over the group                        identity
gather       the tokens of all ranks                   sum, of which each rank keeps its own tokens
scatter      sum, of which each rank keeps its tokens  the tokens of all ranks
scatter_last my features of a replicated tensor        the features of all ranks
divide       my tokens of a replicated tensor          the tokens of all ranks
join         the tokens of all ranks                   my tokens of a replicated gradient
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.autograd_function import as_output, differentiable_once
from shoal.comm.collectives import all_gather, all_reduce, join, my_part, reduce_scatter

TOKENS, FEATURES = -2, -1
"""The dims of an activation along which it is divided."""


def enter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Pass a replicated tensor to the ranks' parts of a computation (identity; all-reduce in the backward)."""
    return _applied(_Enter, x, group)


def leave(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' parts of a result."""
    return _applied(_Leave, x, group)


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the tokens of all ranks."""
    return _applied(_GatherTokens, x, group)


def scatter_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' parts and return my tokens."""
    return _applied(_ScatterTokens, x, group)


def gather_last(x: Tensor, group: dist.ProcessGroup, total: int) -> Tensor:
    """Gather the features of all ranks, `total` in all."""
    return _applied(_Join, x, FEATURES, group, total)


def scatter_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return my features of a replicated tensor."""
    return _applied(_Divide, x, FEATURES, group)


def divide_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return my tokens of a replicated tensor."""
    return _applied(_Divide, x, TOKENS, group)


def join_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the tokens of all ranks into a replicated tensor."""
    return _applied(_Join, x, TOKENS, group, x.shape[TOKENS] * group.size())


def _applied(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


class _Enter(torch.autograd.Function):
    """Forward: identity. Backward: the sum of the gradients of all ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        return all_reduce(grads[0], ctx.group), None


class _Leave(torch.autograd.Function):
    """Forward: the sum of the parts. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return as_output(all_reduce(x, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _GatherTokens(torch.autograd.Function):
    """Forward: the tokens of all ranks. Backward: the sum, of which each rank keeps its own tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return as_output(all_gather(x, TOKENS, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        return reduce_scatter(grads[0], TOKENS, ctx.group), None


class _ScatterTokens(torch.autograd.Function):
    """Forward: the sum, of which each rank keeps its own tokens. Backward: the tokens of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return as_output(reduce_scatter(x, TOKENS, group))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        return all_gather(grads[0], TOKENS, ctx.group), None


class _Join(torch.autograd.Function):
    """Forward: the parts of all ranks along a dim. Backward: my own; every rank computes the same loss from all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup, total: int) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return as_output(join(x, dim, group, total))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        return my_part(grads[0], ctx.dim, ctx.group).contiguous(), None, None, None


class _Divide(torch.autograd.Function):
    """Forward: my part of a replicated tensor along a dim. Backward: the gradients of the parts of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group, ctx.total = dim, group, x.shape[dim]
        return my_part(x, dim, group).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        return join(grads[0], ctx.dim, ctx.group, ctx.total), None, None
