"""A folder in shared memory that outlives the workers of a run, and goes when the run does.

The process that starts the workers makes it and holds a lock in it. What such a process left behind when it was killed
itself has no lock any more, and is removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import ShoalError

LOCK = "lock"


@contextmanager
def memory_tier(where: str) -> Iterator[Path]:
    """A new folder in a memory file system, for as long as the context lasts."""
    _sweep(Path(where))
    try:
        root = Path(tempfile.mkdtemp(prefix=_prefix(), dir=where))
    except OSError as error:
        raise ShoalError(
            f"{where!r} cannot hold the state of this run: {error.strerror}",
            fix="--checkpoint.memory_dir of a memory file system, or --checkpoint.memory_every 0step",
        ) from None
    with (root / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield root
        finally:
            shutil.rmtree(root, ignore_errors=True)


def _sweep(where: Path) -> None:
    """Remove the folders of this user that nobody holds."""
    for root in where.glob(f"{_prefix()}*"):
        try:
            with (root / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
        except OSError:  # it is held, or was just made and has no lock yet
            continue


def _prefix() -> str:
    return f"shoal-{os.getuid()}-"
