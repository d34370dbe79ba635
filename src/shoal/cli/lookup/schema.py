"""`shoal schema`: print the JSON schema of a recipe. Editors use it to complete keys and to mark mistakes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from shoal.config.recipe import Recipe
from shoal.errors import ShoalError


def main(arguments: Sequence[str]) -> int:
    """Print the schema, which is JSON with and without --json."""
    if "--help" in arguments or "-h" in arguments:
        print(f"usage: shoal schema > recipe.schema.json\n\n{__doc__}", end="")
        return 0
    if unknown := [word for word in arguments if word != "--json"]:
        raise ShoalError(
            f"schema takes no arguments, got {unknown[0]!r}", fix="shoal schema > recipe.schema.json", code="R002"
        )
    print(json.dumps(Recipe.model_json_schema(), indent=2))
    return 0
