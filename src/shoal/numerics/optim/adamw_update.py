"""AdamW of one tensor in plain torch: the computation that `kernels.adamw` does in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.numerics.precision import wide


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """All inputs of an update, except the tensors that it changes."""

    step: Tensor
    """The number of this step, counted from 1."""
    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    seed: int
    """The seed of the rounding to bfloat16."""
    divisor: Tensor | None
    """The divisor of gradients; see `numerics.optim.build.step_scaled`."""
    dropped: Tensor | None


def update_plainly(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, update: Update) -> None:
    """Update a weight and its two moments in place."""
    if update.dropped is not None and bool(update.dropped):
        return
    dtype = wide(weight.dtype)
    g = gradient.to(dtype)
    g = g if update.divisor is None else g / update.divisor.to(dtype)
    beta1, beta2 = update.betas
    m = first.to(dtype).lerp(g, 1.0 - beta1)
    v = second.to(dtype) * beta2 + (1.0 - beta2) * g * g
    correction1, correction2 = (1.0 - beta ** float(update.step) for beta in update.betas)
    change = update.lr / correction1 * m / (v.sqrt() / correction2**0.5 + update.eps)
    w = weight.to(dtype) * (1.0 - update.lr * update.decay) - change
    generator = torch.Generator(weight.device).manual_seed(update.seed)
    for stored, value in ((first, m), (second, v), (weight, w)):
        stored.copy_(stochastically_rounded(value, generator) if stored.dtype == torch.bfloat16 else value)


def stochastically_rounded(x: Tensor, generator: torch.Generator) -> Tensor:
    """Convert float32 to bfloat16, up or down with probabilities such that the mean is x."""
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = ((x.contiguous().view(torch.int32) + noise) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)
