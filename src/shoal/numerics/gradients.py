"""Gradients between the last backward and the optimizer: global norm, clipping, and the loss scale of fp16.

All decisions follow from one number: the norm over all reduced gradients of all parameters. Every rank has the same
number, so every rank makes the same decision about clipping, overflow and NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.numerics.precision import wide

PIECE = 2**20
"""Numbers of a gradient in host memory that are added up at once: enough for all cores."""


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that exist, in the order of the parameters."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each gradient in at least float32, in few kernels."""
    if gradients and all(x.is_cuda and x.dtype == torch.bfloat16 and x.is_contiguous() for x in gradients):
        from shoal.numerics.kernels.gradients import norms_in_one_pass  # Triton, which CPUs do not have

        return norms_in_one_pass(gradients)
    if gradients and all(x.device.type == "cpu" for x in gradients):
        return [_norm_on_host(x) for x in gradients]
    if any(gradient.dtype.itemsize < 4 for gradient in gradients):
        if len({gradient.dtype for gradient in gradients}) > 1:
            return [torch.linalg.vector_norm(x, dtype=wide(x.dtype)) for x in gradients]
        return list(torch._foreach_norm(gradients, dtype=torch.float32))
    return list(torch._foreach_norm(gradients)) if gradients else []


def _norm_on_host(x: Tensor) -> Tensor:
    """Return the 2-norm by pieces. torch adds up a large tensor in float32 with an error of per cents, and one in
    bfloat16 at a tenth of the speed."""
    dtype = wide(x.dtype)
    pieces = x.reshape(-1).split(PIECE) if x.numel() > PIECE else (x,)
    norms = torch.stack([torch.linalg.vector_norm(piece.to(dtype)) for piece in pieces])
    whole: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(norms)
    return whole


def global_norm(norms: Sequence[Tensor]) -> Tensor:
    """Combine 2-norms, possibly on several devices, into the 2-norm of all gradients as one vector."""
    if not norms:
        return torch.zeros(())
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([x if x.device == device else x.to(device) for x in norms]))
    return total


def clip_coefficient(norm: Tensor, largest: float) -> Tensor:
    """Return the factor that limits the norm to `largest`, computed as `clip_grad_norm_` does."""
    return torch.clamp(largest / (norm + 1e-6), max=1.0)


def scale_(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply all gradients in place, in one kernel where the device has it."""
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))  # another device if parameters are offloaded


@dataclass
class LossScale:
    """The dynamic loss scale of fp16: halved on overflow, doubled after `window` finite steps. Scale 1, window 0:
    fixed.

    Its state is two numbers, the same on every rank because they follow from the global norm alone.
    """

    scale: float = 1.0
    window: int = 0
    good_steps: int = 0

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale adapts."""
        return self.window > 0

    @property
    def is_exhausted(self) -> bool:
        """Whether halving cannot help: an overflow at scale 1 is a NaN."""
        return self.scale <= 1.0

    def succeeded(self) -> None:
        """Record a step with finite gradients."""
        if self.is_dynamic:
            self.good_steps += 1
            if self.good_steps >= self.window:
                self.scale, self.good_steps = self.scale * 2.0, 0

    def overflowed(self) -> None:
        """Record a step that was dropped."""
        self.scale, self.good_steps = max(self.scale / 2.0, 1.0), 0
