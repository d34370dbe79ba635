"""Weights that are kept in bfloat16 (`optim.weights: bf16`): which plans they are for."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.blueprint.plan import Plan
from shoal.errors import Problem, raise_if

COMPUTES_SO = ("bf16", "fp8")
"""Precisions whose products are of bfloat16, or less."""


def narrow_weight_problems(plan: Plan) -> Iterator[Problem]:
    """What in a plan would see more of weights than bfloat16 has, or keep or send them otherwise than rounded at
    random, one by one."""
    if plan.precision not in COMPUTES_SO:
        yield Problem(
            "weights in bf16 are for the precisions bf16 and fp8, whose products see no more of them, not for"
            f" {plan.precision}",
            "--optim.weights fp32, or --plan.precision bf16",
        )
    for axis, word, why in (
        ("sync", f"sync={plan.sync}", "which adds up small changes of weights on its way"),
        ("compress", f"compress={plan.compress}", "which keeps what did not travel in their precision"),
        ("offload", f"offload={plan.offload}", "whose copies on the host are torch's to update"),
    ):
        if getattr(plan, axis) not in (None, "none"):
            yield Problem(f"weights in bf16 are not built for {word}, {why}", f"--optim.weights fp32, or no {axis}")


def refuse_narrow_weights(plan: Plan) -> None:
    """Raise for a plan that they are not for."""
    raise_if(narrow_weight_problems(plan), title=f"plan '{plan.brief()}'")
