"""The lock of a run directory: which command holds it, and whether that command has begun to train there.

    lock    3f9a0c41d2e85b76    the command that has claimed the directory last
            begun               it has written its recipe, so a restart of it resumes

The kernel releases the lock when the process ends that holds it. The text stays, for a restart of the same command.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from shoal.errors import ShoalError
from shoal.files import opened, read_regular

MOST_COMMAND = 2**10
"""The largest size of a lock in bytes."""
BEGUN = "begun"
"""The second line of a lock, once the command in its first line has begun to train."""
LOCK_TIMEOUT = 6.0
"""Seconds to wait for a lock: children of a killed process hold it until they end, after five."""


def locked(path: Path) -> BinaryIO:
    """Lock a directory; the kernel releases the lock when this process ends."""
    file: BinaryIO = opened(path / "lock", "ab")
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise _taken(path) from None
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return file
        else:
            return file


def is_locked(path: Path) -> bool:
    """Whether another process holds the lock of a directory."""
    if not os.path.exists(path / "lock"):
        return False
    try:
        locked(path).close()
    except ShoalError:
        return True
    except OSError:
        return False
    return False


def reject_locked(path: Path) -> None:
    """Raise if another process holds the lock of a directory."""
    if is_locked(path):
        raise _taken(path)


def _taken(path: Path) -> ShoalError:
    return ShoalError(
        f"another process is training in {str(path)!r}; nothing was touched",
        fix="--run.dir SOMEWHERE_ELSE, or wait for its end",
        code="C027",
    )


def sign(lock: BinaryIO, command: str, *, has_begun: bool) -> None:
    """Write into the lock which command holds it, since several runs of one recipe may exist, and whether it trains."""
    text, handle = f"{command}\n{BEGUN}\n" if has_begun else f"{command}\n", lock.fileno()
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_APPEND)
    if not has_begun:  # else a kill or a full disk keeps the mark: without it a restart may start over once more
        os.ftruncate(handle, 0)
    os.pwrite(handle, text.encode(), 0)  # unbuffered, so that `close` cannot fail
    os.ftruncate(handle, len(text.encode()))


def signature(path: Path) -> tuple[str, bool]:
    """The command that has claimed a directory last, and whether it has begun to train there."""
    with suppress(OSError):
        command, _, rest = read_regular(path / "lock", MOST_COMMAND).decode(errors="replace").partition("\n")
        return command, rest.strip() == BEGUN
    return "", False


def has_begun_in(path: Path, command: str) -> bool:
    """Whether a command has begun to train in a directory. What follows a slash is not compared: torchrun restarts
    processes without anything by which one command differs from another."""
    signed, is_begun = signature(path)
    return is_begun and signed.partition("/")[0] == command.partition("/")[0]
