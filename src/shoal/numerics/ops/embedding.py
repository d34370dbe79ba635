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
    if isinstance(layer, nn.Embedding) and _has_kernel(layer):
        rows: Tensor = _Embedded.apply(tokens, layer.weight)  # type: ignore[no-untyped-call]
        return rows
    return narrowed(layer(tokens))


def _has_kernel(layer: nn.Embedding) -> bool:
    """Whether the layer is a plain lookup in weights that are cast to bfloat16."""
    weight = layer.weight
    is_lookup = type(layer) is nn.Embedding and is_plain(layer)
    has_rules = layer.padding_idx is not None or layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
    is_cast = weight.is_cuda and weight.dtype.itemsize <= 4 and compute_dtype(weight) == torch.bfloat16
    return is_lookup and not has_rules and is_cast


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        from shoal.numerics.kernels.embedding import gathered  # Triton, which CPUs do not have

        ctx.save_for_backward(tokens)
        ctx.like = weight.shape, weight.dtype
        return gathered(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        from shoal.numerics.kernels.embedding import scattered

        (tokens,) = ctx.saved_tensors
        return None, scattered(tokens, grads[0], *ctx.like)
