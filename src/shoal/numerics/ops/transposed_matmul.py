"""The gradient of what a weight was multiplied by, from a copy of the weight that is transposed.

    y = x Wᵀ ─▶ d_x = d_y W         W (outputs, inputs), the sum over outputs: over columns of W as it lies in memory

A weight in float32 is cast for this product anyway, and transposed in the same pass the sum goes along its rows, as
in the forward. On a GPU the product of a gradient with a weight that has many more inputs than outputs is faster so;
that of the others is as fast either way (docs/concepts/gpu.md). It is an operator, whose result a compiler leaves as it
lies.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, library


def times_transposed(grad: Tensor, weight: Tensor) -> Tensor:
    """grad W, computed in the precision of the gradient."""
    if grad.is_cuda and grad.dtype.itemsize == 2 and weight.dtype == torch.float32:
        return F.linear(grad, torch.ops.shoal.transposed(weight, grad.dtype))
    return grad @ weight.T.to(grad.dtype).T  # transposed twice, so that a compiler does not keep the forward's cast


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
