"""Transformer layers that save less for the backward than autograd, or torch.compile, would.

Both save the input of every product, for the gradient of its weight. The inputs of these products are cheap to compute
again from tensors that are saved anyway (F: feed-forward, D: model dim; last column: saved tensors of D features
fewer):

    rms_norm_linear   x ─ norm ─▶ n ─ W ─▶ y                    saves x and one number per token; recomputes n      1
                        └─▶ x, for the residual sum with y: so one pass computes both gradients of x
    swiglu_linear     gate, up ─ silu(gate)·up ─▶ g ─ W ─▶ y    saves gate and up; recomputes g                   F/D
    linears           x ─ norm ─▶ n;  n ─ W ─▶ y                saves x, as the norm does; recomputes n             1

The price is one or two multiplications per element, in a backward that reads and writes those elements anyway. The
recomputation multiplies in another order than the forward: else a compiler would notice that it is the same, and save
it.

These functions take layers and use their weights without calling them. If a layer must be called (it is split over
ranks, computes in fp8 or has hooks), they call the layers one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.autograd_function import differentiable_once
from shoal.numerics.ops.rms_norm import NormSource, norm_backward, normed_again
from shoal.numerics.ops.swiglu import Activation, activated, swiglu_backward
from shoal.numerics.ops.transposed_matmul import times_transposed
from shoal.numerics.precision import compute_dtype, narrowed, wide


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, also for an x in lower precision than the scale: it computes in the precision of the scale.

    `narrows`: return bfloat16 under that autocast, for a layer that would cast the result anyway.
    """

    def __init__(self, *arguments: Any, narrows: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.narrows = narrows

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x over its last dim."""
        normed = super().forward(x.to(self.weight.dtype))
        return narrowed(normed) if self.narrows else normed


def rms_norm_linear(
    x: Tensor, norm: RMSNorm | None, *layers: nn.Linear, together: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return x, for the residual sum, and the output of each layer for the norm of x, or for x itself.

    `together`: compute one product where possible, which a GPU does faster than several. Then there is one tensor with
    the outputs side by side. The weights are joined where they are cast. Where they are not cast, that is a copy, which
    is worth it for narrow layers only.
    """
    is_known = torch.is_grad_enabled() and norm is not None and _is_rms(norm) and all(map(is_product, layers))
    if norm is None or not is_known or not (x.requires_grad or any(layer.weight.requires_grad for layer in layers)):
        normed = x if norm is None else norm(x)
        return x, tuple(layer(normed) for layer in layers)
    eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
    weights, dtype = [layer.weight for layer in layers], compute_dtype(x)
    is_one = together and x.is_cuda and _is_cheap(layers, dtype)
    with without_autocast(x):
        passed, *products = _RMSNormLinears.apply(x, norm.weight, eps, dtype, is_one, *weights)  # type: ignore[no-untyped-call]
    return passed, tuple(products)


def linears(
    normed: Tensor, source: NormSource | None, *layers: nn.Linear, together: bool = False
) -> tuple[Tensor, ...]:
    """Return the output of each layer for the output of a norm, which the backward computes again from its source.
    Without a source it is saved. `together`: see `rms_norm_linear`. The layers may have biases."""
    if not torch.is_grad_enabled() or not all(map(is_linear, layers)):
        return tuple(layer(normed) for layer in layers)
    dtype, has_bias = compute_dtype(normed), {layer.bias is not None for layer in layers}
    is_one = together and normed.is_cuda and _is_cheap(layers, dtype) and len(has_bias) == 1
    with without_autocast(normed):
        weights = [layer.weight for layer in layers]
        products = _Linears.apply(normed.to(dtype), is_one, *(source or (None, None, None)), *weights)  # type: ignore[no-untyped-call]
        if not any(has_bias):
            return tuple(products)
        biases = _cast([layer.bias for layer in layers], dtype, is_one) if is_one else [layer.bias for layer in layers]
        return tuple(y if bias is None else y + bias.to(dtype) for y, bias in zip(products, biases, strict=True))


def _is_cheap(layers: Sequence[nn.Linear], dtype: torch.dtype) -> bool:
    """Whether joining the weights costs little: they are cast anyway, or narrow."""
    is_cast = layers[0].weight.dtype != dtype
    return is_cast or all(layer.out_features <= layer.in_features for layer in layers)


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Apply a layer; the gradient of its weight is computed directly in the precision of the weight."""
    if not is_linear(layer) or not torch.is_grad_enabled():
        called: Tensor = layer(x)
        return called
    dtype = compute_dtype(x)
    with without_autocast(x):
        y: Tensor = _Linear.apply(x.to(dtype), layer.weight)  # type: ignore[no-untyped-call]
        return y if layer.bias is None else y + layer.bias.to(dtype)


def swiglu_linear(
    parts: Sequence[Tensor], layer: nn.Linear, *, recompute: bool = True, activation: Activation = "silu"
) -> Tensor:
    """Apply a layer to silu(gate) · up: the second half of a gated feed-forward. `parts` are gate and up, or one joint
    tensor. `activation`: a function in place of silu.

    `recompute`: compute the input of the layer again in the backward. Else it is saved: F/D more memory, no more time.
    """
    if not is_linear(layer) or not torch.is_grad_enabled():
        gate, up = _gate_and_up(parts)
        called: Tensor = layer(activated(gate, activation) * up)
        return called
    dtype = compute_dtype(parts[0])
    with without_autocast(parts[0]):
        cast = (part.to(dtype) for part in parts)
        y: Tensor = _SwigluLinear.apply(layer.weight, recompute, activation, *cast)  # type: ignore[no-untyped-call]
        return y if layer.bias is None else y + layer.bias.to(dtype)


def _gate_and_up(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return parts if len(parts) == 2 else parts[0].chunk(2, -1)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast: every cast here is explicit."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _is_rms(norm: nn.Module) -> bool:
    """Whether this is exactly the norm that is computed below; a subclass may compute anything."""
    return type(norm) is RMSNorm and is_plain(norm)


def is_product(layer: nn.Module) -> bool:
    """Whether this is exactly a product with a weight."""
    return is_linear(layer) and layer.bias is None


def is_linear(layer: nn.Module) -> bool:
    """Whether this is exactly a product with a weight, and perhaps a bias."""
    return type(layer) is nn.Linear and is_plain(layer)


def is_plain(module: nn.Module) -> bool:
    """Whether a module has no hooks and its class's own forward."""
    return "forward" not in module.__dict__ and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook sees, or changes, the module's inputs or outputs."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        x, weight = ctx.saved_tensors
        (grad,) = grads
        d_x = grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None
        return d_x, _product(grad, x, weight.dtype) if ctx.needs_input_grad[1] else None


class _RMSNormLinears(torch.autograd.Function):
    """x itself, and the product of its RMSNorm with every weight, or with all of them joined."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, eps: float, dtype: torch.dtype, is_one: bool, *weights: Tensor
    ) -> Any:
        x_wide = x.to(wide(x.dtype))
        inverse = (x_wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        normed = (x_wide * inverse * scale).to(dtype)
        ctx.save_for_backward(x, scale, inverse, *weights)
        ctx.is_one = is_one
        return x.view_as(x), *(F.linear(normed, weight) for weight in _cast(weights, dtype, is_one))

    @staticmethod
    def backward(ctx: Any, *all_grads: Tensor) -> Any:
        differentiable_once()
        x, scale, inverse, *weights = ctx.saved_tensors
        of_x, *grads = all_grads
        cast = _cast(weights, grads[0].dtype, ctx.is_one)
        d_normed = [grad @ weight for grad, weight in zip(grads, cast, strict=True)]
        d_x, d_scale, normed = norm_backward(d_normed, of_x, x, scale, inverse)
        assert normed is not None
        needed = ctx.needs_input_grad[5:]
        d_weights: list[Tensor | None] = [None] * len(weights)
        if ctx.is_one and any(needed):
            joint = _product(grads[0], normed, weights[0].dtype)
            d_weights = list(joint.split([weight.shape[0] for weight in weights]))
        elif not ctx.is_one:
            pairs = zip(grads, needed, strict=True)
            d_weights = [_product(grad, normed, weights[0].dtype) if is_needed else None for grad, is_needed in pairs]
        return d_x, d_scale, None, None, None, *d_weights


class _Linears(torch.autograd.Function):
    """The product of a norm's output with every weight, or with all of them joined."""

    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        is_one: bool,
        x: Tensor | None,
        scale: Tensor | None,
        inverse: Tensor | None,
        *weights: Tensor,
    ) -> Any:
        kept = [normed] if x is None else [x, scale, inverse]
        ctx.save_for_backward(*weights, *kept)
        ctx.is_one, ctx.num_weights = is_one, len(weights)
        return tuple(F.linear(normed, weight) for weight in _cast(weights, normed.dtype, is_one))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        saved = ctx.saved_tensors  # read once: a recomputed block gives them once
        weights, kept = saved[: ctx.num_weights], saved[ctx.num_weights :]
        dtype, needed = grads[0].dtype, ctx.needs_input_grad[5:]
        d_normed = None
        if ctx.needs_input_grad[0]:
            first, *others = (
                grad @ weight for grad, weight in zip(grads, _cast(weights, dtype, ctx.is_one), strict=True)
            )
            d_normed = sum(others, start=first)
        d_weights: list[Tensor | None] = [None] * len(weights)
        if any(needed):
            normed = kept[0] if len(kept) == 1 else normed_again(NormSource(*kept), dtype)
            products = [
                _product(grad, normed, weights[0].dtype) if ctx.is_one or is_needed else None
                for grad, is_needed in zip(grads, [True] if ctx.is_one else needed, strict=True)
            ]
            d_weights = list(products[0].split([len(weight) for weight in weights])) if ctx.is_one else products  # type: ignore[union-attr]
        return d_normed, None, None, None, None, *d_weights


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, recompute: bool, activation: Activation, *parts: Tensor) -> Tensor:
        gate, up = _gate_and_up(parts)
        gated = activated(gate, activation) * up
        ctx.save_for_backward(weight, *parts, *([] if recompute else [gated]))
        ctx.recompute, ctx.activation = recompute, activation
        return F.linear(gated, weight.to(gated.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        differentiable_once()
        (grad,) = grads
        weight, *saved = ctx.saved_tensors
        parts = saved if ctx.recompute else saved[:-1]
        d_gated = times_transposed(grad, weight)
        d_parts, gated = swiglu_backward(parts, d_gated, recompute=ctx.recompute, activation=ctx.activation)
        gated = saved[-1] if gated is None else gated
        d_weight = _product(grad, gated, weight.dtype) if ctx.needs_input_grad[0] else None
        return d_weight, None, None, *d_parts


def _product(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a weight that was multiplied by x, in the precision of the weight: a GPU's float32 sums
    are not rounded in between."""
    left, right = grad.flatten(0, -2).T, x.flatten(0, -2)
    if left.is_cuda and left.dtype.itemsize < 4 and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _cast(weights: Sequence[Tensor], dtype: torch.dtype, is_one: bool) -> list[Tensor]:
    """Cast weights, if `is_one` into one tensor: free in a compiled block, else one more copy."""
    cast = [weight.to(dtype) for weight in weights]
    return [torch.cat(cast)] if is_one else cast
