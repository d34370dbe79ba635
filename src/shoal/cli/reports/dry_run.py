"""What `shoal train --dry-run` prints: the resolved recipe, its layout, and the memory and arithmetic of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from shoal.blueprint.layout_drawing import draw_layout
from shoal.config.load import dump_recipe
from shoal.config.recipe import Recipe

GIB = 2**30
PREFIXES = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def show_dry_run(recipe: Recipe, predicted: Mapping[str, Any], *, as_json: bool, out: TextIO) -> None:
    """Print a recipe whose plan is resolved, and its figures."""
    layout = recipe.plan.layout
    if as_json:
        dumped = {"recipe": recipe.model_dump(mode="json"), "ranks": layout.world_size, "predicted": predicted}
        print(json.dumps(dumped), file=out)
        return
    print(dump_recipe(recipe) + "\n" + draw_layout(layout), file=out)
    for name, text in _rows(predicted):
        print(f"{name:<12}{text}", file=out)


def _rows(predicted: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "parameters" in predicted:
        total, trained = predicted["parameters"], predicted["trained_parameters"]
        yield "parameters", f"{total:,}" + (f", of which {trained:,} are trained" if trained != total else "")
    if "memory" in predicted:
        causes = dict(predicted["memory"])
        total = causes.pop("total")
        largest_first = sorted(causes.items(), key=lambda item: -item[1])
        by_cause = ", ".join(f"{cause} {_bytes(size)}" for cause, size in largest_first)
        yield "memory", f"{_bytes(total)} on the fullest rank, predicted: {by_cause}"
    if "flops" in predicted:
        yield "arithmetic", f"{_scaled(predicted['flops'])}FLOP a step on all ranks, predicted"
    if "not_predicted" in predicted:
        yield "memory", f"not predicted: {predicted['not_predicted']}"


def _bytes(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def _scaled(number: float) -> str:
    """A number with the prefix of its size.

    >>> _scaled(2.5e12), _scaled(3e4)
    ('2.50 T', '30.00 k')
    """
    prefix, size = next((found for found in PREFIXES if number >= found[1]), ("", 1.0))
    return f"{number / size:.2f} {prefix}"
