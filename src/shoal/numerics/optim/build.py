"""Build the optimizer of a recipe, and step it without a wait of the host for the device.

The optimizer is torch's, or shoal's where torch has none, where torch's reads whole tensors, or where it is slower."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from shoal.config.recipe import OptimSection
from shoal.errors import ShoalError
from shoal.numerics.local_tensor import is_dtensor, to_local
from shoal.numerics.optim.adamw import AdamW as OwnAdamW
from shoal.numerics.optim.groups import decay_groups, muon_groups
from shoal.numerics.optim.layerwise import LAMB, LARS
from shoal.numerics.optim.lion import Lion
from shoal.numerics.optim.muon import Muon


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    section: OptimSection,
    *,
    lr: float,
    seed: int = 0,
    offload: str = "none",
    matrices: Collection[nn.Parameter] = (),
) -> Optimizer:
    """Build the optimizer, with weight decay for matrices, and none for norms, biases and other vectors.

    `matrices`: the parameters that Muon orthogonalizes; AdamW updates the others.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ShoalError(
            "the model must have a parameter that requires a gradient, got none",
            fix="requires_grad_(True)",
            code="M052",
        )
    groups, betas, eps = decay_groups(trained, section.weight_decay), section.betas, section.eps
    if section.name == "muon":
        groups = muon_groups(trained, matrices, section.weight_decay)
        return Muon(groups, lr=lr, momentum=section.momentum, betas=betas, eps=eps)
    if section.name == "lion":
        return Lion(groups, lr=lr, betas=betas)
    if section.name == "adafactor":
        return Adafactor(groups, lr=lr)
    if section.name in ("lamb", "lars"):
        groups = [{**group, "adapts": group["params"][0].ndim >= 2} for group in groups]
    if section.name == "lamb":
        return LAMB(groups, lr=lr, betas=betas, eps=eps)
    if section.name == "lars":
        return LARS(groups, lr=lr, momentum=section.momentum, trust=section.trust)
    if section.name == "adamw" and _is_own(section, trained, offload):
        return OwnAdamW(groups, lr=lr, betas=betas, eps=eps, state_dtype=section.state_dtype, seed=seed)
    fused, foreach = _implementation(section, trained)
    if section.name == "adamw":
        return AdamW(groups, lr=lr, betas=betas, eps=eps, fused=fused, foreach=foreach)
    return SGD(groups, lr=lr, momentum=section.momentum, fused=fused, foreach=foreach)


def memory_of_squares(optimizer: Optimizer) -> float | None:
    """Return the decay of the squared gradients that an optimizer divides by; None: it divides by none, as far as is
    known."""
    group = optimizer.param_groups[0]
    if isinstance(optimizer, Adam | AdamW | NAdam | OwnAdamW) and not isinstance(optimizer, Muon):
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


def use_fused_kernels(optimizer: Optimizer) -> None:
    """Let torch's optimizer update parameters in host memory by its fused kernel, which is 17 times as fast on 16 cores
    as its default there, unless the script has chosen another. It runs over memory in order, so all tensors of a
    parameter must have one layout: here the plain one."""
    is_sharded = any(is_dtensor(parameter) for group in optimizer.param_groups for parameter in group["params"])
    if type(optimizer) not in ((AdamW, Adam) if is_sharded else (AdamW, Adam, SGD, Adagrad)):
        return  # torch has no fused kernel of the others for DTensors
    for group in optimizer.param_groups:
        is_chosen = group.get("fused") is not None or group.get("foreach") is not None
        fits = all(to_local(p).is_contiguous() and p.is_floating_point() for p in group["params"])
        if fits and not is_chosen and not group.get("differentiable"):
            group["fused"] = True


def _is_own(section: OptimSection, parameters: list[nn.Parameter], offload: str) -> bool:
    """Whether to use shoal's AdamW: for states or weights in bf16, and on a GPU, where it is the fastest."""
    if section.state_dtype == "bf16" or section.param_dtype == "bf16":
        return True
    is_fp32 = all(parameter.dtype == torch.float32 for parameter in parameters)
    stays = offload == "none"  # torch's is faster in host memory
    return section.implementation == "auto" and stays and is_fp32 and all(p.device.type == "cuda" for p in parameters)


def _implementation(section: OptimSection, parameters: list[nn.Parameter]) -> tuple[bool, bool]:
    """Return `(fused, foreach)` for torch. Its fused SGD does not know shards."""
    choice = section.implementation
    if choice == "auto" and section.name == "sgd" and any(map(is_dtensor, parameters)):
        choice = "foreach"
    if choice == "auto":
        fusible = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
        types = {parameter.device.type for parameter in parameters}
        choice = "fused" if {p.dtype for p in parameters} <= fusible and types <= {"cpu", "cuda"} else "foreach"
    return choice == "fused", choice == "foreach"
