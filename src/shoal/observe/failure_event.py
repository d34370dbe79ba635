"""Write the reason of a failure into the run directory that a command has claimed, for `shoal report`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shoal.config.recipe import Recipe
from shoal.observe.events import append_failure
from shoal.observe.run_names import directory_of_command


@contextmanager
def noting_failure(recipe: Recipe, command: str) -> Iterator[None]:
    """Note an exception of the block, and raise it."""
    try:
        yield
    except Exception as error:
        note_failure(recipe, command, error)
        raise


def note_failure(recipe: Recipe, command: str, error: Exception) -> None:
    """Note a failure after which the command may continue."""
    if (path := directory_of_command(recipe, command)) is not None:
        append_failure(path, error)
