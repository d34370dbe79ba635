"""Embedding lookup in the precision of the products that follow.

torch gathers rows in the precision of the weight and casts them. In its backward it casts their gradients, sorts them
by token and sums them in several passes over tensors as large as the weight. Here a GPU gathers and casts in one pass,
and writes the gradient of the weight once: each row is the sum of its tokens' gradients, in their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shoal.comm.autograd_function import differentiable_once
from shoal.numerics.ops.memory_saving_linear import is_plain
from shoal.numerics.precision import compute_dtype, narrowed


def embedded(tokens: Tensor, layer: nn.Module) -> Tensor:
    """Look up tokens in `layer`, in bfloat16 if products are computed in it."""
    rows = looked_up(tokens, layer) if type(layer) is nn.Embedding and is_plain(layer) else None
    return narrowed(layer(tokens)) if rows is None else rows


def looked_up(tokens: Tensor, layer: nn.Embedding) -> Tensor | None:
    """The rows of a layer that is a plain lookup, in bfloat16; None: they are not cast to it, or have a rule that the
    kernel does not know."""
    weight = layer.weight
    has_rules = layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
    is_cast = weight.is_cuda and weight.dtype.itemsize <= 4 and compute_dtype(weight) == torch.bfloat16
    if has_rules or not is_cast:
        return None
    rows: Tensor = _Embedded.apply(tokens, weight, layer.padding_idx)  # type: ignore[no-untyped-call]
    return rows


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        from shoal.numerics.kernels.embedding import gathered  # Triton, which CPUs do not have

        ctx.save_for_backward(tokens)
        ctx.like, ctx.padding = (weight.shape, weight.dtype), padding
        return gathered(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        from shoal.numerics.kernels.embedding import scattered

        (tokens,) = ctx.saved_tensors
        gradient = scattered(tokens, grads[0], *ctx.like)
        if ctx.padding is not None:
            gradient[ctx.padding] = 0.0
        return None, gradient, None
