"""Where a model meets a plan, in straight-line order; what cannot be laid out yet is refused here, by name."""

from __future__ import annotations

import torch
from torch import nn

from shoal.blueprint.plan import Plan
from shoal.errors import Problem, raise_if
from shoal.parallel.replicate import replicate


def refuse_unbuilt(plan: Plan) -> None:
    """Raise for every word of a resolved plan that this version plans but cannot run."""
    axes = [axis for axis in ("dp_shard", "cp", "tp", "pp", "ep") if getattr(plan, axis) != 1]
    words = [f"{axis}={getattr(plan, axis)}" for axis in axes]
    words += [f"zero={plan.zero}"] if plan.zero else []
    words += [f"recompute={plan.recompute}"] if plan.recompute != "none" else []
    words += [f"offload={plan.offload}"] if plan.offload != "none" else []
    words += [f"compress={plan.compress}"] if plan.compress else []
    words += [plan.precision] if plan.precision == "fp8" else []
    raise_if(
        (
            Problem(f"{word} cannot be run by this version", "leave it out: dp_replicate, mb and precision can be set")
            for word in words
        ),
        title=f"plan '{plan}'",
    )


def compose(
    module: nn.Module, plan: Plan, *, device: torch.device, bucket_mb: float | None, find_unused: bool
) -> nn.Module:
    """Lay a module that is already on its device over the ranks of a resolved plan."""
    degree = plan.layout.dp_replicate
    return replicate(module, device=device, degree=degree, bucket_mb=bucket_mb, find_unused=find_unused)
