"""RMSNorm that saves its input and one number per row; and its backward, also where its input is the residual stream.

    x ─┬─ n = x · inverse · scale ─▶ products        d_n   one gradient per product, to be summed
       └──────────────────────────▶ sum              of_x  the gradient of x from there

A compiler makes two or three kernels of it, which read some of these tensors twice: d_x needs a sum over features,
along rows, and d_scale one over tokens, along columns. On a GPU it is one kernel here, and an opaque operator for the
compiler; elsewhere plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, library

from shoal.comm.autograd_function import differentiable_once
from shoal.numerics.precision import compute_dtype, wide


class NormSource(NamedTuple):
    """What the output of a norm can be computed from again."""

    x: Tensor
    scale: Tensor
    inverse: Tensor


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, NormSource]:
    """Normalize x over its last dim; return bfloat16 under that autocast, since the next layer would cast it anyway."""
    dtype = torch.bfloat16 if compute_dtype(x) == torch.bfloat16 else torch.promote_types(x.dtype, scale.dtype)
    normed, inverse = _RMSNorm.apply(x, scale, eps, dtype)  # type: ignore[no-untyped-call]
    return normed, NormSource(x.detach(), scale.detach(), inverse)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x_wide = x.to(wide(x.dtype))
        inverse = (x_wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, scale, inverse)
        ctx.mark_non_differentiable(inverse)
        return (x_wide * inverse * scale).to(dtype), inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        d_x, d_scale, _ = norm_backward(grads[:1], None, *ctx.saved_tensors, recompute=False)
        return d_x, d_scale, None, None


_WIDTH = 512
"""Features from which on the kernel is used for a norm by itself. The norm of a head has fewer, and a compiler fuses it
with its neighbours."""


def norm_backward(
    d_normed: Sequence[Tensor],
    of_x: Tensor | None,
    x: Tensor,
    scale: Tensor,
    inverse: Tensor,
    *,
    recompute: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x and of the scale; with `recompute`, also the norm, in the precision of its gradients.

    `inverse` is 1 over the root of the mean square of each row of x, with a last dim of 1, in at least float32.
    `of_x`: None if x is used for nothing else.
    """
    is_worth_it = of_x is not None or x.shape[-1] >= _WIDTH
    if x.is_cuda and inverse.dtype == torch.float32 and is_worth_it:
        d_x, d_scale, normed = torch.ops.shoal.norm_backward(list(d_normed), of_x, x, scale, inverse, recompute)
        return d_x, d_scale, normed if recompute else None
    return _plainly(d_normed, of_x, x, scale, inverse, recompute=recompute)


def normed_again(source: NormSource, dtype: torch.dtype) -> Tensor:
    """Compute the norm again, for a backward. The order of the product is not that of the forward: else a compiler
    would save the forward's result."""
    x, scale, inverse = source
    return (x.to(inverse.dtype) * (inverse * scale)).to(dtype)


def _plainly(
    d_normed: Sequence[Tensor],
    of_x: Tensor | None,
    x: Tensor,
    scale: Tensor,
    inverse: Tensor,
    *,
    recompute: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    unscaled = x.to(inverse.dtype) * inverse
    normed = normed_again(NormSource(x, scale, inverse), d_normed[0].dtype) if recompute else None
    d = sum(part.to(inverse.dtype) for part in d_normed)
    d_scale = (d * unscaled).flatten(0, -2).sum(0).to(scale.dtype)
    d_unscaled = d * scale
    d_x = inverse * (d_unscaled - unscaled * (d_unscaled * unscaled).mean(-1, keepdim=True))
    return (d_x if of_x is None else d_x + of_x).to(x.dtype), d_scale, normed


library.define(
    "shoal::norm_backward",
    "(Tensor[] d_normed, Tensor? of_x, Tensor x, Tensor scale, Tensor inverse, bool recompute)"
    " -> (Tensor, Tensor, Tensor)",
)


@library.impl("shoal::norm_backward", "CUDA")
def _on_gpu(
    d_normed: list[Tensor], of_x: Tensor | None, x: Tensor, scale: Tensor, inverse: Tensor, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from shoal.numerics.kernels.rms_norm import norm_backward_in_one_pass  # Triton, which CPUs do not have

    return norm_backward_in_one_pass(d_normed, of_x, x, scale, inverse, recompute=recompute)


@library.register_fake("shoal::norm_backward")  # type: ignore[untyped-decorator]
def _shapes(
    d_normed: list[Tensor], of_x: Tensor | None, x: Tensor, scale: Tensor, inverse: Tensor, recompute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    normed = torch.empty(x.shape if recompute else (0,), dtype=d_normed[0].dtype, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(scale), normed
