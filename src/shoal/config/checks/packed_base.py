"""Recipes that cannot pack the frozen weights below adapters in 4 bits (`model.lora.base: nf4`)."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.blueprint.plan import Plan
from shoal.config.recipe import Recipe
from shoal.errors import Problem


def check_packed_base(recipe: Recipe, plan: Plan) -> Iterator[Problem]:
    """Find a plan, with its layout, that cuts weights before they are packed, and settings that read them."""
    lora = recipe.model.lora
    if lora is None or lora.base is None:
        return
    cuts = [f"tp={plan.layout.tp}"] if plan.layout.tp > 1 else []
    if plan.is_sharded:
        cuts.insert(0, f"zero={plan.zero or 3}")
    if cuts:
        yield Problem(
            "L034",
            f"model.lora.base {lora.base} packs whole weights after they are loaded, got {cuts[0]}, which cuts them",
            "--plan.zero 0 --plan.tp 1, or --model.lora.base null",
        )
    if recipe.run.compile:
        yield Problem(
            "L033",
            "torch.compile does not see the products with frozen weights in 4 bits, got run.compile true",
            "--run.compile false, or --model.lora.base null",
        )
