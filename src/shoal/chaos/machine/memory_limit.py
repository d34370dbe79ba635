"""A control group around the run, of which the memory can be limited for a moment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOM = 192 * 2**20
"""Bytes that the run may still take under the limit."""
_ROOTS = {
    Path("/sys/fs/cgroup/memory"): ("memory.usage_in_bytes", "memory.limit_in_bytes", "-1"),
    Path("/sys/fs/cgroup"): ("memory.current", "memory.max", "max"),
}
"""Versions 1 and 2 of control groups: the files of use and limit, and no limit."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A control group."""

    folder: Path
    use: str
    limit: str
    none: str

    def hold(self, pid: int) -> None:
        """Put a process, and all that it will start, into the group."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def tighten(self) -> None:
        """Allow a little more than is used now."""
        used = int((self.folder / self.use).read_text())
        (self.folder / self.limit).write_text(str(used + ROOM))

    def loosen(self) -> None:
        """Remove the limit."""
        (self.folder / self.limit).write_text(self.none)


@contextmanager
def memory_limit(name: str) -> Iterator[MemoryLimit | None]:
    """Make a control group; None: this machine does not allow it."""
    group = _made(name)
    try:
        yield group
    finally:
        if group is not None:
            _remove(group.folder)


def can_limit_memory() -> bool:
    """Whether this process may make control groups with a limit of memory."""
    with memory_limit(f"shoal-chaos-try-{os.getpid()}") as group:
        return group is not None


def _made(name: str) -> MemoryLimit | None:
    for root, (use, limit, none) in _ROOTS.items():
        with suppress(OSError):
            folder = root / name
            folder.mkdir()
            if (folder / limit).exists() and os.access(folder / limit, os.W_OK):
                return MemoryLimit(folder, use, limit, none)
            folder.rmdir()
    return None


def _remove(folder: Path) -> None:
    for _ in range(100):  # its processes have been killed, and may take a moment to end
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.02)
