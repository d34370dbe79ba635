"""`shoal schema`: the JSON schema of a recipe. Editors that know it complete keys and mark mistakes while typing."""

from __future__ import annotations

import json
from collections.abc import Sequence

from shoal.blueprint.recipe import Recipe
from shoal.errors import ShoalError


def main(arguments: Sequence[str]) -> int:
    """Print the schema."""
    if unknown := [word for word in arguments if word not in ("--json", "-h", "--help")]:
        raise ShoalError(f"schema takes no {unknown[0]!r}", fix="shoal schema > recipe.schema.json")
    print(json.dumps(Recipe.model_json_schema(), indent=2))
    return 0
