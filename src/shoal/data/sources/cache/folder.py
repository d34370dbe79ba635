"""The folder of the cache, its lock, and files that appear in it completely or not at all.

Several ranks of a host open the same source at the same time. The first one takes the lock and fills the cache, and the
others wait and use it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError

SECONDS_BETWEEN_LINES = 5.0
POLL = 0.05
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk. Others in a block that writes are those of its own work, such as a network."""


def cache_folder(setting: str | None, kind: str) -> Path:
    """The folder for one kind of content: below `data.cache`, or below ~/.cache/shoal/data."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "shoal" / "data"
    folder = (Path(setting) if setting else default).expanduser().absolute() / kind
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder


def unwritable(path: Path, error: OSError) -> ShoalError:
    """The error for a cache that cannot be written, because of permissions or a full disk."""
    return ShoalError(
        f"cannot write the data cache {path}: {error.strerror or error}",
        fix="--data.cache FOLDER on a local disk with room",
        code="D089",
    )


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file until the block ends. The system releases it if the process dies."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unwritable(path, error) from error
    progress = Progress(f"waiting for another process that {what}")
    try:
        while not _has_lock(handle, path):
            progress.show("")
            time.sleep(POLL)
        yield
    finally:
        os.close(handle)


def _has_lock(handle: int, path: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems have no locks
        raise unwritable(path, error) from error
    return True


@contextmanager
def replaced(path: Path) -> Iterator[Any]:
    """A file to write that gets its name, and replaces an older one, when the block ends without an error.

    Only the holder of the lock writes, so that a temporary file of the same name is left over from a killed process.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with suppress(FileNotFoundError):
            os.unlink(part)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(part)
        if isinstance(error, OSError) and (error.errno in FULL or error.filename == str(part)):
            raise unwritable(path, error) from error
        raise


class Progress:
    """Lines on stderr, at most one in some seconds, so that short work prints nothing."""

    def __init__(self, what: str) -> None:
        self._what, self._next = what, time.monotonic() + SECONDS_BETWEEN_LINES

    def show(self, state: str) -> None:
        """Print the state, if it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SECONDS_BETWEEN_LINES
            say(f"{self._what}{': ' if state else ''}{state}")


def say(line: str) -> None:
    """Print a line on stderr."""
    print(f"data   {line}", file=sys.stderr, flush=True)
