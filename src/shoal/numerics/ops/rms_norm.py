"""The backward of RMSNorm whose input is also the residual stream.

    x ─┬─ n = x · inverse · scale ─▶ products        d_n   one gradient per product, to be summed
       └──────────────────────────▶ sum              of_x  the gradient of x from there

A compiler makes two or three kernels of it, which read some of these tensors twice: d_x needs a sum over features,
along rows, and d_scale one over tokens, along columns. On a GPU it is one kernel here, and an opaque operator for the
compiler; elsewhere plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, library


def norm_backward(
    d_normed: Sequence[Tensor], of_x: Tensor, x: Tensor, scale: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and of the scale, and the norm recomputed in the precision of its gradients.

    `inverse` is 1 over the root of the mean square of each row of x, with a last dim of 1, in at least float32.
    """
    if x.is_cuda and inverse.dtype == torch.float32:
        d_x, d_scale, normed = torch.ops.shoal.norm_backward(list(d_normed), of_x, x, scale, inverse)
        return d_x, d_scale, normed
    return _plainly(d_normed, of_x, x, scale, inverse)


def _plainly(
    d_normed: Sequence[Tensor], of_x: Tensor, x: Tensor, scale: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    unscaled = x.to(inverse.dtype) * inverse
    # Multiply in another order than the forward does: else a compiler would save the forward's result.
    normed = (x.to(inverse.dtype) * (inverse * scale)).to(d_normed[0].dtype)
    d = sum(part.to(inverse.dtype) for part in d_normed)
    d_scale = (d * unscaled).flatten(0, -2).sum(0).to(scale.dtype)
    d_unscaled = d * scale
    d_x = inverse * (d_unscaled - unscaled * (d_unscaled * unscaled).mean(-1, keepdim=True))
    return (d_x + of_x).to(x.dtype), d_scale, normed


library.define(
    "shoal::norm_backward",
    "(Tensor[] d_normed, Tensor of_x, Tensor x, Tensor scale, Tensor inverse) -> (Tensor, Tensor, Tensor)",
)


@library.impl("shoal::norm_backward", "CUDA")
def _on_gpu(
    d_normed: list[Tensor], of_x: Tensor, x: Tensor, scale: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from shoal.numerics.kernels.rms_norm import norm_backward_in_one_pass  # Triton, which CPUs do not have

    return norm_backward_in_one_pass(d_normed, of_x, x, scale, inverse)


@library.register_fake("shoal::norm_backward")  # type: ignore[untyped-decorator]
def _shapes(
    d_normed: list[Tensor], of_x: Tensor, x: Tensor, scale: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    normed = torch.empty(x.shape, dtype=d_normed[0].dtype, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(scale), normed
