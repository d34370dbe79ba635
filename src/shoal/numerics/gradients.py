"""Gradients between the last backward and the optimizer: their global norm, clipping, and the loss scale of fp16.

One number decides everything here: the norm over all gradients of all parameters, after they were reduced. Every rank
has the same one, so clipping, "this step overflowed" and "this is NaN" are the same decision on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shoal.numerics.precision import wide


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that exist, in the order of the parameters."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each in at least float32, in few kernels."""
    if gradients and all(x.is_cuda and x.dtype == torch.bfloat16 and x.is_contiguous() for x in gradients):
        from shoal.numerics.kernels.gradients import norms_in_one_pass  # Triton, which CPUs do not have

        return norms_in_one_pass(gradients)
    if any(gradient.dtype.itemsize < 4 for gradient in gradients):
        if len({gradient.dtype for gradient in gradients}) > 1:
            return [torch.linalg.vector_norm(x, dtype=wide(x.dtype)) for x in gradients]
        return list(torch._foreach_norm(gradients, dtype=torch.float32))
    return list(torch._foreach_norm(gradients)) if gradients else []


def global_norm(norms: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all of them as one vector, from those of each; they may lie on several devices."""
    if not norms:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def clip_coefficient(norm: Tensor, largest: float) -> Tensor:
    """What gradients are multiplied by so that their norm is at most `largest`; as `clip_grad_norm_` computes it."""
    return torch.clamp(largest / (norm + 1e-6), max=1.0)


def scale_(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply all of them in place, in one kernel where the device has it."""
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].device))  # elsewhere if parameters are offloaded


@dataclass
class LossScale:
    """The dynamic loss scale of fp16: halved on overflow, doubled after `window` good steps. Scale 1, window 0: never.

    Its state is two numbers, both the same on every rank because they follow from the global norm alone.
    """

    scale: float = 1.0
    window: int = 0
    good_steps: int = 0

    @property
    def is_dynamic(self) -> bool:
        """Whether there is anything to adapt."""
        return self.window > 0

    @property
    def is_exhausted(self) -> bool:
        """Whether halving no longer helps: what overflows at scale 1 is not an overflow but a NaN."""
        return self.scale <= 1.0

    def succeeded(self) -> None:
        """A step with finite gradients was made."""
        if self.is_dynamic:
            self.good_steps += 1
            if self.good_steps >= self.window:
                self.scale, self.good_steps = self.scale * 2.0, 0

    def overflowed(self) -> None:
        """A step was dropped."""
        self.scale, self.good_steps = max(self.scale / 2.0, 1.0), 0
