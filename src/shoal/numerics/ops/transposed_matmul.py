"""The gradient of the input of a linear layer, computed with a transposed copy of the weight.

    y = x Wᵀ ─▶ d_x = d_y W         W (outputs, inputs); the sum is over outputs, the columns of W in memory

A weight in float32 is cast for this product anyway. If the same pass transposes it, the sum runs along rows, as in the
forward. On a GPU this is faster for a weight that has many more inputs than outputs, and as fast for others
(docs/concepts/gpu.md). It is an operator, so that a compiler does not change the memory layout of its result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, library


def times_transposed(grad: Tensor, weight: Tensor) -> Tensor:
    """Compute grad W in the precision of the gradient."""
    if grad.is_cuda and grad.dtype.itemsize == 2 and weight.dtype == torch.float32:
        return F.linear(grad, torch.ops.shoal.transposed(weight, grad.dtype))
    return grad @ weight.T.to(grad.dtype).T  # transposed twice, so that a compiler does not save the forward's cast


library.define("shoal::transposed", "(Tensor x, ScalarType dtype) -> Tensor")


@library.impl("shoal::transposed", "CUDA")
def _on_gpu(x: Tensor, dtype: torch.dtype) -> Tensor:
    from shoal.numerics.kernels.transposed_matmul import transpose  # Triton, which CPUs do not have

    transposed: Tensor = _shape(x, dtype)
    transpose(x.contiguous(), transposed)
    return transposed


@library.register_fake("shoal::transposed")  # type: ignore[untyped-decorator]
def _shape(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty((x.shape[1], x.shape[0]), dtype=dtype, device=x.device)
