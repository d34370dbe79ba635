"""The last layer of a language model and its cross-entropy as one function, in which the logits never exist as a whole.

torch gives `linear` and `cross_entropy`. Between them lie the logits of every token, and in the backward their gradient
too: with 128k words in the vocabulary and 32k tokens that is 8 GB each in bfloat16, more than the rest of a small model
keeps. Here tokens go through in chunks, and a chunk's logits become their own gradient at once, in place:

    chunk c    logits_cV = h_cD Wᵀ  ──▶  loss,  logits ← softmax - onehot  ──▶  dh_cD = logits W,   dW += logitsᵀ h

So the forward does the backward's work as well, each of the three products once, and the backward only multiplies by
the gradient of the loss. That is right for a loss that is a sum over tokens, which all of shoal's are.

In fp8 the logits, and with them the loss, are as exact as before; the two products of the backward are of 8-bit floats.
The gradient of a logit is between -1 and 1 whatever the model is, so its scale is known before it is computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.numerics.fp8_products import FAR, MULTIPLE, Narrow, product, turned
from shoal.numerics.precision import compute_dtype, wide

CHUNK_BYTES = 2**31
"""At most so many bytes of logits exist at a time, and half of them all. Smaller chunks would add to the gradient of
the weight more often."""
_TOKENS = 128
"""Chunks are multiples of so many tokens, which kernels like."""
_FACTOR = 2.0**15
"""What brings gradients of logits, at most 1, into the range of 8-bit floats of the kind that reaches far."""


def linear_cross_entropy(h: Tensor, weight: Tensor, labels: Tensor, *, ignore: int, fp8: bool = False) -> Tensor:
    """The cross-entropy of `h @ weight.T` with the labels, summed over those that are not `ignore`.

    h is (tokens, features), weight (vocabulary, features), labels (tokens). Under autocast the products are computed in
    its precision; the softmax is, and gradients of the weight are summed up, in at least float32. `fp8`: the products
    of the backward are of 8-bit floats, where sizes allow it.
    """
    if not torch.is_grad_enabled():  # of which the function below would hear nothing
        h, weight = h.detach(), weight.detach()
    dtype = compute_dtype(h)
    with torch.autocast(h.device.type, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(h.to(dtype), weight, labels, ignore, fp8)  # type: ignore[no-untyped-call]
    return loss


def tokens_of_chunk(num_tokens: int, vocabulary: int, size_bytes: int) -> int:
    """How many tokens have their logits at a time: as even chunks as can be.

    >>> tokens_of_chunk(32768, 128256, 2), tokens_of_chunk(4096, 128256, 2), tokens_of_chunk(512, 1000, 4)
    (8192, 2048, 512)
    """
    most = max(1, CHUNK_BYTES // (vocabulary * size_bytes) // _TOKENS) * _TOKENS
    least = 1 if num_tokens * vocabulary * size_bytes < CHUNK_BYTES // 8 else 2
    chunks = max(least, -(-num_tokens // most))
    return max(1, -(-num_tokens // chunks // _TOKENS)) * _TOKENS


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, labels: Tensor, ignore: int, fp8: bool) -> Tensor:
        needs_h, needs_weight = ctx.needs_input_grad[:2]
        is_narrow = fp8 and all(size % MULTIPLE == 0 for size in (*h.shape, len(weight)))
        w = weight.to(h.dtype)
        w_turned = turned(w) if is_narrow and needs_h else None
        total = torch.zeros((), dtype=wide(h.dtype), device=h.device)
        dh = torch.empty_like(h) if needs_h else None
        dw = torch.empty_like(weight, dtype=wide(weight.dtype)) if needs_weight else None
        if dw is not None and not len(h):
            dw.zero_()
        size = tokens_of_chunk(h.shape[0], weight.shape[0], h.dtype.itemsize)
        for start in range(0, h.shape[0], size):
            part, keep = slice(start, start + size), float(start > 0)
            logits = h[part] @ w.T
            if is_narrow and (needs_h or needs_weight):
                loss, gradient, gradient_turned = cross_entropy_in_fp8(logits, labels[part], ignore=ignore)
                if dh is not None and w_turned is not None:
                    dh[part] = product(gradient, w_turned, dh.dtype)
                if dw is not None:
                    share = product(gradient_turned, turned(h[part]), dw.dtype)
                    dw = dw.add_(share) if keep else share
                    del share
                del gradient, gradient_turned
            else:
                loss = cross_entropy_(logits, labels[part], ignore=ignore, with_gradient=needs_h or needs_weight)
                if dh is not None:
                    torch.mm(logits, w, out=dh[part])
                if dw is not None:
                    _add_product(dw, logits.T, h[part], keep=keep)
            total += loss
            del logits  # before the next ones are there
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(dh, dw)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """In place: what was saved is used once. (A second backward through the same graph fails before this.)"""
        dh, dw = ctx.saved_tensors
        return (
            None if dh is None else _times_(dh, grads[0], dh.dtype),
            None if dw is None else _times_(dw, grads[0], ctx.weight_dtype),
            None,
            None,
            None,
        )


def _times_(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_cuda and x.dtype.itemsize < 8:
        from shoal.numerics.cross_entropy_kernel import times_  # Triton, which CPUs do not have

        return times_(x, factor, dtype)
    return x.mul_(factor).to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, keep: float) -> None:
    """total = keep * total + a @ b, summed in the precision of the total. keep=0: it holds nothing yet."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=keep)
    elif total.is_cuda:
        torch.addmm(total, a, b, beta=keep, out_dtype=total.dtype, out=total)
    else:
        product = (a @ b).to(total.dtype)
        total.copy_(product if not keep else total + product)


def cross_entropy_(logits: Tensor, labels: Tensor, *, ignore: int, with_gradient: bool) -> Tensor:
    """The sum of the losses of rows of logits; and in the place of the logits, its gradient."""
    if logits.is_cuda and logits.dtype.itemsize < 8:
        from shoal.numerics.cross_entropy_kernel import cross_entropy_rows_  # Triton, which CPUs do not have

        losses, _ = cross_entropy_rows_(logits, labels, ignore=ignore, with_gradient=with_gradient)
        return losses.sum()
    exact = logits.to(wide(logits.dtype))
    total = F.cross_entropy(exact, labels, ignore_index=ignore, reduction="sum")
    if with_gradient:
        counts = (labels != ignore)[:, None].to(exact.dtype)
        gradient = exact.softmax(-1).mul_(counts)
        gradient.scatter_add_(-1, labels.clamp(min=0)[:, None], -counts)
        logits.copy_(gradient)
    return total


def cross_entropy_in_fp8(logits: Tensor, labels: Tensor, *, ignore: int) -> tuple[Tensor, Narrow, Narrow]:
    """The sum of the losses of rows of logits, and its gradient in 8-bit floats, as it is and turned around."""
    scale = torch.full((), 1 / _FACTOR, device=logits.device)
    if logits.is_cuda:
        from shoal.numerics.cross_entropy_kernel import cross_entropy_rows_, gradient_in_fp8

        losses, lses = cross_entropy_rows_(logits, labels, ignore=ignore, with_gradient=False)
        gradient, turned_gradient = gradient_in_fp8(logits, labels, lses, ignore=ignore, factor=_FACTOR)
        return losses.sum(), Narrow(gradient, scale), Narrow(turned_gradient, scale)
    exact = logits.to(wide(logits.dtype))
    total = cross_entropy_(exact, labels, ignore=ignore, with_gradient=True)
    gradient = (exact * _FACTOR).to(FAR)
    return total, Narrow(gradient, scale), Narrow(gradient.T.contiguous(), scale)
