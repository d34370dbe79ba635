"""Weights in bfloat16 (`optim.param_dtype: bf16`): the plans that support them."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.blueprint.plan import Plan
from shoal.errors import Problem

COMPUTES_SO = ("bf16", "fp8")
"""Precisions whose matrix products use bfloat16 or less."""


def check_bf16_weights(
    plan: Plan, *, weights: str = "--optim.param_dtype fp32", precision: str = "--plan.precision bf16"
) -> Iterator[Problem]:
    """Values of a plan that need weights of more precision, or that store or send them without stochastic rounding.

    `weights` and `precision` are the fixes to print.
    """
    if plan.precision not in COMPUTES_SO:
        what = f"weights in bf16 need the precision bf16 or fp8, got {plan.precision}"
        yield Problem("P047", what, f"{weights}, or {precision}")
    for key, why in (
        ("sync", "which accumulates small changes of weights"),
        ("compress", "which stores its residual in their dtype"),
    ):
        if (value := getattr(plan, key)) not in (None, "none"):
            yield Problem("P048", f"weights in bf16 do not support {key}={value}, {why}", f"{weights}, or no {key}")
