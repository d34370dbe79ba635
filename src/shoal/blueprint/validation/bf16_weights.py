"""Weights that are kept in bfloat16 (`optim.param_dtype: bf16`): which plans they are for."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.blueprint.plan import Plan
from shoal.errors import Problem, raise_if

COMPUTES_SO = ("bf16", "fp8")
"""Precisions whose products are of bfloat16, or less."""


def reject_bf16_weights(
    plan: Plan, *, weights: str = "--optim.param_dtype fp32", precision: str = "--plan.precision bf16"
) -> None:
    """Raise for a plan that they are not for. `weights` and `precision` are what to type instead, where somebody else
    than a run refuses."""
    raise_if(_problems(plan, weights, precision), title=f"plan '{plan.brief()}'")


def _problems(plan: Plan, weights: str, precision: str) -> Iterator[Problem]:
    """What in a plan would see more of weights than bfloat16 has, or keep or send them otherwise than rounded at
    random, one by one."""
    if plan.precision not in COMPUTES_SO:
        what = "weights in bf16 are for the precisions bf16 and fp8, whose products see no more of them, not for"
        yield Problem(f"{what} {plan.precision}", f"{weights}, or {precision}")
    for axis, word, why in (
        ("sync", f"sync={plan.sync}", "which adds up small changes of weights on its way"),
        ("compress", f"compress={plan.compress}", "which keeps what did not travel in their precision"),
        ("offload", f"offload={plan.offload}", "whose copies on the host are torch's to update"),
    ):
        if getattr(plan, axis) not in (None, "none"):
            yield Problem(f"weights in bf16 are not built for {word}, {why}", f"{weights}, or no {axis}")
