"""Write directories and small files that survive a power loss.

After a power loss a disk holds the bytes of a file as of its last fsync, and the names in a directory as of that
directory's last fsync. Later changes may be there, in part or not at all, and in any order.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shoal.files import opened

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, or of a full quota."""


def sync(path: Path) -> None:
    """Return when the names in a directory, or the bytes of a file, are on the disk.

    A directory that this user cannot read, or on a file system without directory syncs, is skipped.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC or not os.path.isdir(path):
            raise


def make_directory(path: Path, *, private: bool = False) -> None:
    """Create a directory and its parents, and return when their names are on the disk.

    `private`: a new directory has mode 0700; the mode of an existing one does not change. Existing parents are synced
    as well: a killed process may have created them without a sync.
    """
    path.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
    resolved = path.resolve()
    for each in reversed((resolved, *resolved.parents)):
        if not os.path.ismount(each):
            sync(each.parent)


_NO_SYNC = (errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS, errno.ENOTSUP)
"""Errors of another user's directory, or of a file system without directory syncs."""


def write_whole(path: Path, text: str) -> None:
    """Write a small file atomically: a crash or a full disk leaves the old text or the new one, and no part file.

    After a power loss, the new text is certain only if `sync` has followed.
    """
    part = path.with_suffix(".part")
    try:
        with opened(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextmanager
def suppress_full() -> Iterator[None]:
    """Leave out what a full disk does not take."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise


def room(path: Path, error: OSError) -> str:
    """The end of a message about a full disk: ` (12,288 bytes free)`. Empty for another error."""
    if error.errno not in FULL:
        return ""
    with suppress(OSError):
        found = next(each for each in (path, *path.absolute().parents) if each.is_dir())
        usage, files = shutil.disk_usage(found), os.statvfs(found)
        no_inodes = ", and no inode for a new file" if files.f_files and not files.f_favail else ""
        return f" ({usage.free:,} bytes free{no_inodes})"
    return ""
