"""The last layer of a language model and its cross-entropy as one function, without the full logits in memory.

torch has `linear` and `cross_entropy`. Between them are the logits of every token, and in the backward their gradient:
with a vocabulary of 128k and 32k tokens, 8 GB each in bfloat16, more than the rest of a small model saves. Here tokens
are processed in chunks, and a chunk's logits are overwritten by their own gradient at once:

    chunk c    logits_cV = h_cD Wᵀ  ──▶  loss,  logits ← Z (softmax - onehot)  ──▶  dh_cD = 1/Z logits W
                  [1]                             [2]                                     [3]
                                                                                    dW   += logitsᵀ (1/Z h)
                                                                                          [4]
So the forward also does the work of the backward, each of the three products once. The backward only multiplies by the
gradient of the loss [5]. This is correct for a loss that is a sum over tokens, as all of shoal's are. If that gradient
is known in advance (`factor`), nothing is left to multiply.

Z is the sum of exponentials of a token's logits, known only when all of them have been read. So what is written
meanwhile is not divided by Z. The division is left to smaller tensors: one row of h, and of dh. So logits are read
once. In float16 such numbers would overflow, and the gradient is computed in a second pass.

Some models scale their logits, or cap them: c tanh(logits / c). A scale is one of h. With a cap, the gradient of a
logit is also multiplied by the slope of the cap, 1 - (capped / c)², where it is written.

In fp8 the logits, and with them the loss, are as exact as before; the two products of the backward are of 8-bit floats.
The gradient of a logit is between -1 and 1 for any model, so its scale is known before it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.comm.autograd_function import differentiable_once
from shoal.numerics.fp8.products import FAR, MULTIPLE, ScaledTensor, product, transposed
from shoal.numerics.precision import compute_dtype, wide

CHUNK_BYTES = 2**31
"""Maximum bytes of logits at a time; large batches also have at most half of theirs at a time. Smaller chunks would add
to the gradient of the weight more often."""
_TOKENS = 128
"""Chunks are multiples of this many tokens, which suits kernels."""
_FACTOR = 2.0**15
"""Scales gradients of logits, at most 1, into the range of wide-range 8-bit floats."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # nothing in it to fuse; and see `as_output`
def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore: int,
    fp8: bool = False,
    factor: float | Callable[[], float] = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the cross-entropy of `h @ weight.T` with the labels, summed over those that are not `ignore`.

    h is (tokens, features), weight (vocabulary, features), labels (tokens). Under autocast the products use its
    precision. The softmax, and the sum of the weight's gradients, are in at least float32. `fp8`: the products of the
    backward are of 8-bit floats, where sizes allow it. `factor`: the expected gradient of the loss, or a function that
    returns it; if it is right, the backward has nothing to do. Logits l are `scale` · l, or, with a `softcap`,
    softcap · tanh(scale · l / softcap).
    """
    if not torch.is_grad_enabled():  # the function below cannot see this
        h, weight = h.detach(), weight.detach()
    dtype = compute_dtype(h)
    h = h if scale == 1.0 else h * scale
    factor = factor() if callable(factor) else factor
    factor = 1.0 if dtype == torch.float16 else factor  # float16 would lose numbers multiplied by a small factor
    with torch.autocast(h.device.type, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            h.to(dtype).contiguous(), weight, labels, ignore, fp8 and softcap is None, factor, softcap
        )
    return loss


def tokens_of_chunk(num_tokens: int, vocabulary: int, size_bytes: int) -> int:
    """Return how many tokens have their logits in memory at a time, in chunks as even as possible.

    >>> tokens_of_chunk(32768, 128256, 2), tokens_of_chunk(4096, 128256, 2), tokens_of_chunk(512, 1000, 4)
    (8192, 2048, 512)
    """
    most = max(1, CHUNK_BYTES // (vocabulary * size_bytes) // _TOKENS) * _TOKENS
    least = 1 if num_tokens * vocabulary * size_bytes < CHUNK_BYTES // 8 else 2
    chunks = max(least, -(-num_tokens // most))
    return max(1, -(-num_tokens // chunks // _TOKENS)) * _TOKENS


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        labels: Tensor,
        ignore: int,
        fp8: bool,
        factor: float,
        softcap: float | None,
    ) -> Tensor:
        needs_h, needs_weight = ctx.needs_input_grad[:2]
        is_narrow = fp8 and all(size % MULTIPLE == 0 for size in (*h.shape, len(weight)))
        w = weight.to(h.dtype)
        w_transposed = transposed(w) if is_narrow and needs_h else None
        total = torch.zeros((), dtype=wide(h.dtype), device=h.device)
        dh = torch.empty_like(h) if needs_h else None
        dw = h.new_empty(weight.shape, dtype=wide(weight.dtype)) if needs_weight else None
        if dw is not None and not len(h):
            dw.zero_()
        size = tokens_of_chunk(h.shape[0], weight.shape[0], h.dtype.itemsize)
        for start in range(0, h.shape[0], size):
            part, keep = slice(start, start + size), float(start > 0)
            logits = h[part] @ w.T  # [1]
            if not (needs_h or needs_weight):
                loss = cross_entropy_(logits, labels[part], ignore=ignore, with_gradient=False, softcap=softcap)
            elif is_narrow:
                loss, gradient, gradient_transposed = cross_entropy_in_fp8(  # [2]
                    logits, labels[part], ignore=ignore, factor=factor
                )
                if dh is not None and w_transposed is not None:
                    dh[part] = product(gradient, w_transposed, dh.dtype)  # [3]
                if dw is not None:
                    share = product(gradient_transposed, transposed(h[part]), dw.dtype)  # [4]
                    dw = dw.add_(share) if keep else share
                    del share
                del gradient, gradient_transposed
            else:
                loss, rows = gradient_(  # [2] rows: factor / Z
                    logits, labels[part], ignore=ignore, factor=factor, softcap=softcap
                )
                if dh is not None:
                    torch.mm(logits, w, out=dh[part])  # [3]
                    if rows is not None:
                        _times_(dh[part], rows)
                if dw is not None:
                    scaled = h[part] if rows is None else _times(h[part], rows, h.dtype)
                    _add_product(dw, logits.T, scaled, keep=keep)  # [4]
            total += loss
            del logits  # free it before the next chunk allocates
        ctx.weight_dtype, ctx.factor = weight.dtype, factor
        ctx.save_for_backward(dh, dw)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """[5] In place: the saved tensors are used once. (A second backward through the same graph fails before
        this.)"""
        differentiable_once()
        dh, dw = ctx.saved_tensors
        if grads[0].device.type == "cpu" and float(grads[0]) == _rounded(ctx.factor, grads[0].dtype):  # as expected
            used = [one for one in (dh, dw) if one is not None]
            torch.autograd.graph.increment_version(used)  # makes autograd reject a second backward
            return dh, None if dw is None else dw.to(ctx.weight_dtype), *[None] * 5
        rest = grads[0] / torch.full_like(grads[0], ctx.factor)  # a Python number would be rounded twice: not quite 1
        if dw is not None:
            dw = _times_(dw, rest) if dw.dtype == ctx.weight_dtype else _times(dw, rest, ctx.weight_dtype)
        return None if dh is None else _times_(dh, rest), dw, *[None] * 5


def _rounded(number: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(number, dtype=dtype))


def _times(x: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply x by one number, or each of its rows by its own."""
    if x.is_cuda and x.dtype.itemsize < 8:
        from shoal.numerics.kernels.cross_entropy import times  # Triton, which CPUs do not have

        return times(x, factors, dtype)
    return (x * (factors[:, None] if factors.dim() else factors)).to(dtype)


def _times_(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply in place; a factor of 1 costs nothing on a GPU."""
    if x.is_cuda and x.dtype.itemsize < 8:
        from shoal.numerics.kernels.cross_entropy import times

        torch.autograd.graph.increment_version(x)  # makes autograd reject a second backward, as on a CPU
        return times(x, factors, x.dtype, is_in_place=True)
    return x.mul_(factors[:, None] if factors.dim() else factors)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, keep: float) -> None:
    """total = keep * total + a @ b, summed in the precision of the total. keep=0: total is uninitialized."""
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=keep)
    elif total.is_cuda:
        torch.addmm(total, a, b, beta=keep, out_dtype=total.dtype, out=total)
    else:
        product = (a @ b).to(total.dtype)
        total.copy_(product if not keep else total + product)


def cross_entropy_(
    logits: Tensor, labels: Tensor, *, ignore: int, with_gradient: bool, softcap: float | None = None
) -> Tensor:
    """Return the sum of the losses of rows of logits, and replace the logits by its gradient."""
    if logits.is_cuda and logits.dtype.itemsize < 8:
        from shoal.numerics.kernels.cross_entropy import cross_entropy_rows_  # Triton, which CPUs do not have

        losses, _ = cross_entropy_rows_(logits, labels, ignore=ignore, with_gradient=with_gradient, softcap=softcap)
        return losses.sum()
    exact = capped(logits.to(wide(logits.dtype)), softcap)
    total = F.cross_entropy(exact, labels, ignore_index=ignore, reduction="sum")
    if with_gradient:
        counts = (labels != ignore)[:, None].to(exact.dtype)
        gradient = exact.softmax(-1).mul_(counts)
        gradient.scatter_add_(-1, labels.clamp(min=0)[:, None], -counts)
        logits.copy_(gradient if softcap is None else gradient.mul_(_slope(exact, softcap)))
    return total


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """softcap · tanh(logits / softcap)."""
    return logits if softcap is None else (logits / softcap).tanh() * softcap


def _slope(capped_logits: Tensor, softcap: float) -> Tensor:
    """The derivative of a capped logit by the logit."""
    return 1.0 - (capped_logits / softcap).square_()


def gradient_(
    logits: Tensor, labels: Tensor, *, ignore: int, factor: float, softcap: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the losses, and replace the logits by their gradient without a factor per row.

    Also return those factors, times `factor`. None: the gradient is complete, as on a CPU, where it includes `factor`,
    and in float16, where `factor` is 1."""
    if logits.dtype == torch.float16:
        return cross_entropy_(logits, labels, ignore=ignore, with_gradient=True, softcap=softcap), None
    if logits.is_cuda and logits.dtype.itemsize < 8:
        from shoal.numerics.kernels.cross_entropy import exponentials_  # Triton, which CPUs do not have

        losses, factors = exponentials_(logits, labels, ignore=ignore, factor=factor, softcap=softcap)
        return losses.sum(), factors
    # Few operators: on a CPU the calls of a small step take longer than the arithmetic.
    exact = capped(logits.to(wide(logits.dtype)), softcap)
    log_p = torch.log_softmax(exact, -1)
    total = F.nll_loss(log_p, labels, ignore_index=ignore, reduction="sum")
    label, p = labels.clamp(min=0)[:, None], log_p.exp_()
    others = p.scatter_(-1, label, 0.0).sum(-1, keepdim=True)
    gradient = p.scatter_(-1, label, -others)  # not p - 1, which cancels when p is nearly 1
    gradient.mul_((labels != ignore).to(p.dtype).mul_(factor)[:, None])
    logits.copy_(gradient if softcap is None else gradient.mul_(_slope(exact, softcap)))
    return total, None


def cross_entropy_in_fp8(
    logits: Tensor, labels: Tensor, *, ignore: int, factor: float
) -> tuple[Tensor, ScaledTensor, ScaledTensor]:
    """Return the sum of the losses, and its gradient times a factor in 8-bit floats, as it is and transposed."""
    scale = torch.full((), factor / _FACTOR, device=logits.device)
    if logits.is_cuda:
        from shoal.numerics.kernels.cross_entropy import cross_entropy_rows_, gradient_in_fp8

        losses, lses = cross_entropy_rows_(logits, labels, ignore=ignore, with_gradient=False)
        gradient, transposed_gradient = gradient_in_fp8(logits, labels, lses, ignore=ignore, factor=_FACTOR)
        return losses.sum(), ScaledTensor(gradient, scale), ScaledTensor(transposed_gradient, scale)
    exact = logits.to(wide(logits.dtype))
    total = cross_entropy_(exact, labels, ignore=ignore, with_gradient=True)
    gradient = (exact * _FACTOR).to(FAR)
    return total, ScaledTensor(gradient, scale), ScaledTensor(gradient.T.contiguous(), scale)
