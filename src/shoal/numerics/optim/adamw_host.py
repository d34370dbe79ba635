"""AdamW of one tensor in host memory: on all cores, and with one pass over memory.

Weights and moments in one precision go to torch's fused kernel. Where some are in bfloat16, pieces that fit in the
cache are widened, updated by that kernel, and rounded back. Rounding takes few operations as well: torch draws random
numbers on one core, so a piece of them is drawn once, and mixed with the seed of each piece of each step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shoal.numerics.optim.adamw_update import Update, stochastically_rounded, update_plainly
from shoal.numerics.precision import wide

PIECE = 2**20
"""Elements: enough for all cores, and a few MiB."""
LOW, HIGH = 0xFFFF, -65536
"""The bits of a float32 that bfloat16 drops, and those that it keeps."""
MIXERS = (0x2C1B3C6D, 0x297A2D39, 0x1B56C4E9)
"""Odd numbers, one for each tensor of an update: a product with one of them is a permutation of 32 bits."""


def update_on_host(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, update: Update) -> None:
    """Update a weight and its two moments in place."""
    if update.dropped is not None and bool(update.dropped):
        return
    if update.divisor is not None:  # the kernel would divide in float32, and change the gradient of the script
        dtype = wide(gradient.dtype)
        gradient = gradient.to(dtype) / update.divisor.to(dtype)
    tensors = (weight, gradient, first, second)
    dtypes = {one.dtype for one in tensors}
    is_flat = all(one.is_contiguous() for one in tensors)  # the kernel runs over memory in order
    if is_flat and dtypes in ({torch.float32}, {torch.float64}):
        _fused(weight, gradient, first, second, update)
    elif is_flat and dtypes <= {torch.float32, torch.bfloat16}:
        _by_pieces(weight, gradient, first, second, update)
    else:
        update_plainly(weight, gradient, first, second, replace(update, divisor=None))


def _fused(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, update: Update) -> None:
    adamw(
        [weight], [gradient], [first], [second], [], [update.step - 1], fused=True, amsgrad=False, maximize=False,
        lr=update.lr, beta1=update.betas[0], beta2=update.betas[1], eps=update.eps, weight_decay=update.decay,
    )  # fmt: skip


def _by_pieces(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, update: Update) -> None:
    whole = [one.view(-1) for one in (weight, first, second, gradient)]
    memory = torch.empty(len(whole), min(PIECE, weight.numel()), dtype=torch.float32, device="cpu")
    for number, begin in enumerate(range(0, weight.numel(), PIECE)):
        pieces = [one[begin : begin + PIECE] for one in whole]
        w, m, v, g = (wide[: piece.numel()].copy_(piece) for wide, piece in zip(memory, pieces, strict=True))
        _fused(w, g, m, v, update)
        _round(pieces[:3], (w, m, v), update.seed + number)


def _round(pieces: Sequence[Tensor], values: Sequence[Tensor], seed: int) -> None:
    """Store values; those in bfloat16 are rounded up or down with probabilities such that the mean is the value."""
    if not values[0].sum().isfinite():  # the addition below would make a number of one that is none
        generator = torch.Generator().manual_seed(seed % 2**30)
        for piece, value in zip(pieces, values, strict=True):
            piece.copy_(stochastically_rounded(value, generator) if piece.dtype == torch.bfloat16 else value)
        return
    noise = _noise()[: values[0].numel()]
    bits, shifted = torch.empty_like(noise), torch.empty_like(noise)
    for piece, value, mixer in zip(pieces, values, MIXERS, strict=True):
        if piece.dtype != torch.bfloat16:
            piece.copy_(value)
            continue
        torch.add(noise, (seed * mixer) % 2**31, out=bits)
        bits.bitwise_xor_(torch.bitwise_right_shift(bits, 15, out=shifted)).mul_(mixer)
        bits.bitwise_right_shift_(16).bitwise_and_(LOW)
        bits.add_(value.view(torch.int32)).bitwise_and_(HIGH)
        piece.copy_(bits.view(torch.float32))


@functools.cache
def _noise() -> Tensor:
    """32 random bits for each element of a piece."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31 - 1, (PIECE,), dtype=torch.int32, device="cpu", generator=generator)
