"""The optimizer of a recipe: torch's own, with weight decay where it belongs and the fastest exact implementation."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from shoal.blueprint.recipe import OptimSection
from shoal.errors import ShoalError


def build_optimizer(parameters: Iterable[nn.Parameter], section: OptimSection, *, lr: float) -> Optimizer:
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
    if section.name == "adamw":
        return AdamW(filled, lr=lr, betas=section.betas, eps=section.eps, fused=fused, foreach=foreach)
    return SGD(filled, lr=lr, momentum=section.momentum, fused=fused, foreach=foreach)


def set_lr(optimizer: Optimizer, factor: float) -> None:
    """Set every group to its own peak times `factor`; the peak is what the group was created with."""
    for group in optimizer.param_groups:
        peak = group.setdefault("initial_lr", group["lr"])
        group["lr"] = peak * factor


def _implementation(choice: str, parameters: list[nn.Parameter]) -> tuple[bool, bool]:
    """`(fused, foreach)` as torch wants them."""
    if choice == "auto":
        fusible = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
        types = {parameter.device.type for parameter in parameters}
        choice = "fused" if {p.dtype for p in parameters} <= fusible and types <= {"cpu", "cuda"} else "foreach"
    return choice == "fused", choice == "foreach"
