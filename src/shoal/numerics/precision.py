"""Dtypes of weights, arithmetic and loss for each precision of a plan.

word   weights, optimizer   forward and backward     loss scale
fp64   float64              float64                  1
fp32   float32              float32                  1
bf16   float32              autocast to bfloat16     1
fp16   float32              autocast to float16      dynamic
fp8    float32              as bf16; large products  1
                            in fp8: `numerics.fp8`

bf16 and fp8 also with weights in bfloat16 (`optim.param_dtype`), which the optimizer rounds stochastically.
"""

from __future__ import annotations

import functools
import timeit
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from shoal.errors import ShoalError, listed

Weights = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a run. `compute_dtype` differs from `wide_dtype` only under autocast."""

    name: str
    weight_dtype: torch.dtype
    compute_dtype: torch.dtype
    scales_loss: bool = False

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of losses, inputs, buffers, and gradients while they are reduced."""
        return wide(self.weight_dtype)

    @property
    def frozen_dtype(self) -> torch.dtype:
        """The dtype of the frozen weights below adapters: no update is ever added to them."""
        return self.compute_dtype

    @property
    def is_lower(self) -> bool:
        """Whether it uses autocast."""
        return self.compute_dtype != self.wide_dtype

    def install(self, module: nn.Module, device: torch.device) -> None:
        """Make every forward of the module compute in this precision and return float32."""
        if not self.is_lower:
            return
        silence_matmul_warning(device)
        forward = module.forward

        @functools.wraps(forward)
        def in_lower_precision(*arguments: Any, **options: Any) -> Any:
            with torch.autocast(device.type, dtype=self.compute_dtype):
                output = forward(*arguments, **options)
            return output.float() if isinstance(output, Tensor) and output.is_floating_point() else output

        module.forward = in_lower_precision


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products with x: autocast's, if it is on and casts x."""
    device = x.device.type
    is_cast = not x.is_meta and x.is_floating_point() and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else x.dtype


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Cast as autocast does for torch's own layers."""
    return x.to(compute_dtype(x))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def narrowed(x: Tensor) -> Tensor:
    """Convert the residual stream of a model that computes in bfloat16 to bfloat16: half the bytes for every norm and
    sum, and the same on every layout. In float16 it would overflow, and stays in float32."""
    return x.to(torch.bfloat16) if compute_dtype(x) == torch.bfloat16 else x


def slow_here(precision: Precision, device: torch.device) -> str | None:
    """Return a hint if this CPU has no arithmetic in that precision, so that torch uses a very slow path."""
    if device.type != "cpu" or not precision.is_lower:
        return None
    times = times_longer(precision.compute_dtype)
    if times < SLOW:
        return None
    longer = f"products in {precision.name} take {times:.0f} times as long as in fp32 on this CPU, measured"
    return f"{longer}: --plan.precision fp32 is faster here"


SLOW = 4.0
"""Factor over float32 that a CPU with such arithmetic does not reach."""


def times_longer(dtype: torch.dtype) -> float:
    """Measure a product in `dtype` relative to float32 on this CPU.

    It takes the best of two each, some 0.1 s at worst, and of many if they are fast: other processes interrupt a CPU
    now and then."""
    silence_matmul_warning(torch.device("cpu"))

    def seconds(kind: torch.dtype) -> float:
        x = torch.ones(128, 128, dtype=kind)
        first = timeit.timeit(lambda: x @ x, number=1)  # warms up
        return min(timeit.repeat(lambda: x @ x, number=1, repeat=2 if first > 0.01 else 20))

    return seconds(dtype) / seconds(torch.float32)


def silence_matmul_warning(device: torch.device) -> None:
    """Silence torch's long warning about a slower path on CPUs without arithmetic in lower precision."""
    if device.type == "cpu":
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")


PRECISIONS = {
    policy.name: policy
    for policy in (
        Precision("fp64", torch.float64, torch.float64),
        Precision("fp32", torch.float32, torch.float32),
        Precision("bf16", torch.float32, torch.bfloat16),
        Precision("fp16", torch.float32, torch.float16, scales_loss=True),
        Precision("fp8", torch.float32, torch.bfloat16),
    )
}


def precision_of(name: str, weights: Weights = "fp32") -> Precision:
    """Return the policy of a plan's precision word, with weights in `weights`, where that is allowed."""
    if name not in PRECISIONS:
        raise ShoalError(
            f"precision must be {listed(PRECISIONS)}, got {name!r}", fix="--plan.precision bf16", code="R050"
        )
    if weights not in get_args(Weights):
        raise ShoalError(
            f"weights must be {listed(map(repr, get_args(Weights)))}, got {weights!r}",
            fix='weights="fp32"',
            code="R050",
        )
    if weights == "fp32":
        return PRECISIONS[name]
    assert PRECISIONS[name].compute_dtype == torch.bfloat16, "see `blueprint.validation.bf16_weights`"
    return replace(PRECISIONS[name], weight_dtype=torch.bfloat16)
