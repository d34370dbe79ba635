"""Temporary folders with a lock that shows whether their process runs; the next process removes abandoned ones.

A killed process (`kill -9`, a lost machine) cannot remove its temporary folder. The kernel releases its lock (`flock`)
however the process ends, so a folder without a held lock has no owner any more. Where a file system has no locks,
nothing is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from shoal.errors import ShoalError

LOCK = "lock"
MOST = 100
"""Folders that one process checks."""
OLD = 3600.0
"""Age in seconds from which a folder without a lock file counts as abandoned."""


def scratch_prefix() -> str:
    """The prefix of this user's temporary folders on this host. Hosts may share the parent folder, not its locks."""
    return f"shoal-launch-{os.getuid()}-{_host()}-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for the duration of the context; abandoned ones are removed first."""
    try:
        sweep(Path(tempfile.gettempdir()), scratch_prefix())
        folder, lock = _made()
    except OSError as error:
        what = f"cannot create a temporary folder: {error.strerror or error}"
        where = f" ({error.filename})" if error.filename else ""
        raise ShoalError(what + where, fix="export TMPDIR=/a/writable/folder", code="N027") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def sweep(where: Path, prefix: str) -> None:
    """Remove the abandoned folders of this user."""
    with suppress(OSError):
        for folder in itertools.islice(where.glob(f"{prefix}*"), MOST):
            with _abandoned(folder) as is_abandoned:
                if is_abandoned:
                    shutil.rmtree(folder, ignore_errors=True)


def _held(folder: Path) -> BinaryIO:
    """Lock a folder of this process, until the file is closed or the process ends."""
    file = (folder / LOCK).open("wb")
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _is_of(lock: BinaryIO, folder: Path) -> bool:
    """Whether the lock still belongs to the folder, which another process may have removed before."""
    with suppress(OSError):
        return (folder / LOCK).stat().st_ino == os.fstat(lock.fileno()).st_ino
    return False


@contextmanager
def _abandoned(folder: Path) -> Iterator[bool]:
    """Whether a private folder of this user is abandoned; during the context no other process can lock it."""
    handle: int | None = None
    is_abandoned = False
    try:
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            is_abandoned = time.time() - found.st_mtime > OLD  # if there is no lock
            handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            is_abandoned = False
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_abandoned = True
    except FileNotFoundError:
        pass
    except OSError:  # its owner runs, or it is not a lock file
        is_abandoned = False
    try:
        yield is_abandoned
    finally:
        if handle is not None:
            os.close(handle)


def _host() -> str:
    """Twelve digits that identify the host. Containers of one host share them, as they share its locks."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        text = ""
    return hashlib.sha256((text or socket.gethostname()).encode()).hexdigest()[:12]


def _made() -> tuple[Path, BinaryIO]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=scratch_prefix()))
        with suppress(FileNotFoundError):
            lock = _held(folder)
            if _is_of(lock, folder):
                return folder, lock
