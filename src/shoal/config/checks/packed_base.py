"""Settings that the frozen weights in 4 bits of a recipe exclude (`model.lora.base: nf4`)."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.config.recipe import Recipe
from shoal.errors import Problem


def check_packed_base(recipe: Recipe) -> Iterator[Problem]:
    """Find settings that read the weights."""
    lora = recipe.model.lora
    if lora is None or lora.base is None:
        return
    if recipe.run.compile:
        yield Problem(
            "L033",
            "torch.compile does not see the products with frozen weights in 4 bits, got run.compile true",
            "--run.compile false, or --model.lora.base null",
        )
