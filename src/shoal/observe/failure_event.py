"""Write the reason of a failure into the run directory that a command has claimed, for `shoal report`."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.config.recipe import Recipe
from shoal.files import open_regular
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
    """Note a failure after which the command may continue.

    Until new ranks hold the lock of the directory, no process does. So this one locks the events, for as long as it
    lives: readers see that the run is not dead.
    """
    if (path := directory_of_command(recipe, command)) is not None:
        append_failure(path, error)
        with suppress(OSError):
            _hold(path / "events.jsonl")


_TRIES = 50
_held: dict[tuple[int, int], int] = {}
"""Device and inode of a file → the descriptor by which this process has locked it."""


def _hold(path: Path) -> None:
    """Lock a file until this process ends."""
    handle = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    found = os.fstat(handle)
    for _ in range(_TRIES if (found.st_dev, found.st_ino) not in _held else 0):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # someone looks whether it is locked
            time.sleep(0.002)
        else:
            _held[found.st_dev, found.st_ino] = handle
            return
    os.close(handle)
