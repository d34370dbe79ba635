"""The directories that runs of a recipe get: the named one, or `runs/NAME`, `runs/NAME-2` and so on.

It needs no torch, so that a command that only coordinates finds the directory of its run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from shoal.config.recipe import Recipe
from shoal.observe.run_lock import signature


def claimed_by(recipe: Recipe, command: str) -> Path | None:
    """The directory that a command has claimed before; None: it has claimed none."""
    return next((path for path in numbered_runs(recipe) if command and signature(path)[0] == command), None)


def directory_of_command(recipe: Recipe, command: str) -> Path | None:
    """The directory that a command has claimed, named or numbered; None: it has claimed none."""
    if command and recipe.run.dir and signature(Path(recipe.run.dir))[0] == command:
        return Path(recipe.run.dir)
    return claimed_by(recipe, command)


def numbered_runs(recipe: Recipe) -> Iterator[Path]:
    """`runs/NAME`, `runs/NAME-2`, ... as far as they exist."""
    path = Path("runs") / recipe.run.name
    for number in itertools.count(2):
        if not os.path.exists(path):  # `Path.exists` raises where a folder above may not be searched
            return
        yield path
        path = path.with_name(f"{recipe.run.name}-{number}")
