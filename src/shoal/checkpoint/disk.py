"""What a checkpoint asks of a file system: few operations, each of which a process may not survive.

A save is safe if killing the process before any one of them leaves the checkpoint before it intact. All go through
here, so that a test can do just that: `SHOAL_KILL_AT=17` kills the process, as `kill -9` does, before its 17th
operation.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import BinaryIO

KILL_AT = "SHOAL_KILL_AT"


class Disk:
    """A file system, operation by operation; every one is on the disk when it returns, or is followed by a `sync`."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.count = 0
        self.kill_at = int(os.environ.get(KILL_AT, "0")) if kill_at is None else kill_at

    def _count(self) -> None:
        self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def make(self, path: Path) -> None:
        """A directory, with those above it."""
        self._count()
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> BinaryIO:
        """A new file to write to."""
        self._count()
        return path.open("wb")

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        """More of it."""
        self._count()
        file.write(data)

    def close(self, file: BinaryIO) -> None:
        """All of it is on the disk after this."""
        self._count()
        file.flush()
        os.fsync(file.fileno())
        file.close()

    def rename(self, old: Path, new: Path) -> None:
        """At once, or not at all."""
        self._count()
        old.rename(new)

    def sync(self, directory: Path) -> None:
        """What was made, renamed or removed in a directory stays so."""
        self._count()
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def remove(self, path: Path) -> None:
        """A file, or a directory with all that is in it."""
        self._count()
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
