"""Build the optimizer of a recipe, and step it without a wait of the host for the device.

The optimizer is torch's, or shoal's AdamW where that is faster."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

from shoal.config.recipe import OptimSection
from shoal.errors import ShoalError
from shoal.numerics.local_tensor import is_dtensor
from shoal.numerics.optim.adamw import AdamW as OwnAdamW
from shoal.numerics.optim.lion import Lion


def build_optimizer(
    parameters: Iterable[nn.Parameter], section: OptimSection, *, lr: float, seed: int = 0, offload: str = "none"
) -> Optimizer:
    """Build the optimizer over two groups: weight decay for matrices, none for norms, biases and other vectors."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ShoalError(
            "the model must have a parameter that requires a gradient, got none",
            fix="requires_grad_(True)",
            code="M052",
        )
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    fused, foreach = _implementation(section.implementation, trained)
    if section.name == "adamw" and _is_own(section, trained, offload):
        return OwnAdamW(filled, lr=lr, betas=section.betas, eps=section.eps, state_dtype=section.state_dtype, seed=seed)
    if section.name == "adamw":
        return AdamW(filled, lr=lr, betas=section.betas, eps=section.eps, fused=fused, foreach=foreach)
    if section.name == "lion":
        return Lion(filled, lr=lr, betas=section.betas)
    return SGD(filled, lr=lr, momentum=section.momentum, fused=fused, foreach=foreach)


def memory_of_squares(optimizer: Optimizer) -> float | None:
    """Return the decay of the squared gradients that an optimizer divides by; None: it divides by none, as far as is
    known."""
    group = optimizer.param_groups[0]
    if isinstance(optimizer, Adam | AdamW | NAdam | OwnAdamW):
        return float(group["betas"][1])
    return float(group["alpha"]) if isinstance(optimizer, RMSprop) else None


def takes_scale(optimizer: Optimizer) -> bool:
    """Whether its kernels divide gradients by a number on the device, and skip the step if another one says so."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_scaled(optimizer: Optimizer, *, divisor: Tensor | None, is_dropped: Tensor) -> None:
    """Step with gradients divided by `divisor`; or skip it, with its counters, if `is_dropped` is not 0. Both are
    numbers on the device, so the host does not wait. torch's fused optimizers take them as attributes."""
    optimizer.grad_scale, optimizer.found_inf = divisor, is_dropped.float()  # type: ignore[attr-defined]
    try:
        with _replicated_scalars(optimizer):
            optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def _replicated_scalars(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Treat plain numbers on the device as replicated DTensors inside: they are the same on every rank."""
    if not any(is_dtensor(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        return nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Set every group to its own peak times `factor`; the peak is the value it was created with."""
    for group in optimizer.param_groups:
        peak = group.setdefault("initial_lr", group["lr"])
        group["lr"] = peak * factor


def _is_own(section: OptimSection, parameters: list[nn.Parameter], offload: str) -> bool:
    """Whether to use shoal's AdamW: for states or weights in bf16, and on a GPU, where it is the fastest."""
    if section.state_dtype == "bf16" or section.param_dtype == "bf16":
        return True
    is_fp32 = all(parameter.dtype == torch.float32 for parameter in parameters)
    stays = offload == "none"  # torch's is faster in host memory
    return section.implementation == "auto" and stays and is_fp32 and all(p.device.type == "cuda" for p in parameters)


def _implementation(choice: str, parameters: list[nn.Parameter]) -> tuple[bool, bool]:
    """Return `(fused, foreach)` for torch."""
    if choice == "auto":
        fusible = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
        types = {parameter.device.type for parameter in parameters}
        choice = "fused" if {p.dtype for p in parameters} <= fusible and types <= {"cpu", "cuda"} else "foreach"
    return choice == "fused", choice == "foreach"
