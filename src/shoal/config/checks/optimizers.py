"""Optimizers of a recipe that read whole tensors, under plans that cut tensors."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.blueprint.plan import Plan
from shoal.config.recipe import Recipe
from shoal.errors import Problem

WHOLE = {"adafactor": "Adafactor", "muon": "Muon", "lamb": "LAMB", "lars": "LARS"}
"""Names of optimizers that read whole tensors."""
JOINS_SHARDS = ("muon", "lamb", "lars")
"""Those that put the shards of zero=1..3 together."""


def check_whole_tensors(recipe: Recipe, plan: Plan) -> Iterator[Problem]:
    """Find an optimizer that reads whole tensors, under a plan, with its layout, that cuts them."""
    name = recipe.optim.name
    if name not in WHOLE:
        return
    cut = cut_by(plan, joins_shards=name in JOINS_SHARDS)
    if name == "adafactor" and plan.sync:
        yield Problem(
            "T072",
            f"Adafactor has states that no replica can save by itself, which sync={plan.sync} needs",
            "--optim.name adamw, or a plan without sync=",
        )
    if cut is not None:
        yield Problem(
            "T051",
            f"{WHOLE[name]} reads whole tensors, and {cut} leaves each rank a piece of them",
            f"--optim.name adamw, or {'' if name in JOINS_SHARDS else '--plan.zero 0 '}--plan.tp 1 --plan.ep 1"
            f"{' --plan.offload none' if plan.offloaded == 'optimizer' else ''}",
        )


def cut_by(plan: Plan, *, joins_shards: bool) -> str | None:
    """Return the words of a plan, with its layout, that leave an optimizer pieces of tensors; None: none does.

    `joins_shards`: the optimizer puts the shards of zero=1..3 together. It cannot with offload=optimizer, which gives
    it copies in host memory that are no DTensors.
    """
    if plan.is_sharded and (not joins_shards or plan.offloaded == "optimizer"):
        return f"zero={plan.zero or 3}{' offload=optimizer' if joins_shards else ''}"
    degrees = ((axis, plan.layout.degree(axis)) for axis in ("tp", "ep"))
    return next((f"{axis}={degree}" for axis, degree in degrees if degree > 1), None)
