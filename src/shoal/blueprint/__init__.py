"""What should happen, on paper: values without processes, devices or torch. The planner and the runtime both read them.

`Recipe` and its sections come in when they are asked for: they stand on pydantic, which takes as long to import as
everything else here together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.blueprint.description import Description as Description
from shoal.blueprint.description import Split as Split
from shoal.blueprint.devices import peak_flops as peak_flops
from shoal.blueprint.duration import Duration as Duration
from shoal.blueprint.layout import AXES as AXES
from shoal.blueprint.layout import Layout as Layout
from shoal.blueprint.plan import Plan as Plan

if TYPE_CHECKING:
    from shoal.blueprint.recipe import Recipe as Recipe


def __getattr__(name: str) -> Any:
    if name == "Recipe":
        from shoal.blueprint.recipe import Recipe

        return Recipe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
