"""A folder in shared memory that outlives the workers of a run, and goes when the run does.

The process that starts the workers makes it and holds a lock in it. If it gives up, what is in there and not on the
disk goes to the disk first. What such a process left behind when it was killed itself has no lock any more, and is
removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.errors import ShoalError
from shoal.train.keeping import rescue

LOCK = "lock"


@contextmanager
def memory_tier(where: str, say: Callable[[str], None]) -> Iterator[Path]:
    """A new folder in a memory file system, for as long as the context lasts."""
    _sweep(Path(where), say)
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
        except BaseException:
            _rescue(root, say)
            raise
        finally:
            shutil.rmtree(root, ignore_errors=True)


def _rescue(root: Path, say: Callable[[str], None]) -> None:
    try:
        step = rescue(root)
    except Exception as error:  # whatever it is, it must not hide why the run has ended
        say(f"what was kept in memory could not be saved: {error}")
    else:
        if step is not None:
            say(f"step {step}, which was kept in memory, is on the disk now")


def _sweep(where: Path, say: Callable[[str], None]) -> None:
    """Remove the folders of this user that nobody holds, when what is in them alone is on the disk."""
    for root in where.glob(f"{_prefix()}*"):
        try:
            with (root / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _rescue(root, say)
                shutil.rmtree(root, ignore_errors=True)
        except OSError:  # it is held, or was just made and has no lock yet
            continue


def _prefix() -> str:
    return f"shoal-tier-{os.getuid()}-"
