"""The optimizer of a recipe: torch's, or shoal's AdamW where that is faster, with weight decay where it belongs; and
how an optimizer takes a step without the host waiting for the device."""

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


def build_optimizer(
    parameters: Iterable[nn.Parameter], section: OptimSection, *, lr: float, seed: int = 0, offload: str = "none"
) -> Optimizer:
    """AdamW or SGD over two groups: weight decay for matrices, none for norms, biases and other vectors."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ShoalError("the model has no parameter that requires a gradient", fix="leave requires_grad on for some")
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    fused, foreach = _implementation(section.implementation, trained)
    if section.name == "adamw" and _is_own(section, trained, offload):
        return OwnAdamW(filled, lr=lr, betas=section.betas, eps=section.eps, states=section.state_dtype, seed=seed)
    if section.name == "adamw":
        return AdamW(filled, lr=lr, betas=section.betas, eps=section.eps, fused=fused, foreach=foreach)
    return SGD(filled, lr=lr, momentum=section.momentum, fused=fused, foreach=foreach)


def memory_of_squares(optimizer: Optimizer) -> float | None:
    """What is left after a step of the squares of gradients that an optimizer divides by; None: it divides by none, as
    far as is known."""
    group = optimizer.param_groups[0]
    if isinstance(optimizer, Adam | AdamW | NAdam | OwnAdamW):
        return float(group["betas"][1])
    return float(group["alpha"]) if isinstance(optimizer, RMSprop) else None


def takes_scale(optimizer: Optimizer) -> bool:
    """Whether its kernels divide gradients by a number on the device, and leave all as it is if another one says so."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_scaled(optimizer: Optimizer, *, divisor: Tensor | None, is_dropped: Tensor) -> None:
    """One step with gradients divided by `divisor`; or none at all, not even of its counters, if `is_dropped` is not 0.
    Both are numbers on the device: nobody has to wait for them. torch's fused optimizers take them as attributes."""
    optimizer.grad_scale, optimizer.found_inf = divisor, is_dropped.float()  # type: ignore[attr-defined]
    try:
        with _replicated_scalars(optimizer):
            optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def _replicated_scalars(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Inside, DTensors take plain numbers on the device as replicated: they are the same on every rank."""
    if not any(is_dtensor(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        return nullcontext()
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication()


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Set every group to its own peak times `factor`; the peak is what the group was created with."""
    for group in optimizer.param_groups:
        peak = group.setdefault("initial_lr", group["lr"])
        group["lr"] = peak * factor


def _is_own(section: OptimSection, parameters: list[nn.Parameter], offload: str) -> bool:
    """Whether the AdamW of shoal is used: for states or weights in bf16, and on a GPU, where it is the fastest."""
    if section.state_dtype == "bf16" or section.param_dtype == "bf16":
        return True
    is_fp32 = all(parameter.dtype == torch.float32 for parameter in parameters)
    stays = offload == "none"  # torch's is the faster one in host memory
    return section.implementation == "auto" and stays and is_fp32 and all(p.device.type == "cuda" for p in parameters)


def _implementation(choice: str, parameters: list[nn.Parameter]) -> tuple[bool, bool]:
    """`(fused, foreach)` as torch wants them."""
    if choice == "auto":
        fusible = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
        types = {parameter.device.type for parameter in parameters}
        choice = "fused" if {p.dtype for p in parameters} <= fusible and types <= {"cpu", "cuda"} else "foreach"
    return choice == "fused", choice == "foreach"
