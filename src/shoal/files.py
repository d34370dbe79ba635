"""Open files under names that other users may control, without hanging and without following links.

`open` blocks on a FIFO, reads a device without end, and follows any symbolic link. In a directory that all users may
write to, such as /dev/shm, another user chooses the file behind a name, and may replace it between two calls. So the
checks here use the open descriptor, never a name:

    open_regular     a regular file, or an `OSError` at once
    PrivateFolder    a directory that only this user can access; its files are looked up relative to its descriptor

`read_small` is for files of the kernel alone, which are read in every turn of a launcher.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_SAFELY = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a symbolic link"),
)

StrPath = str | os.PathLike[str]


def open_regular(path: StrPath, flags: int = os.O_RDONLY, mode: int = 0o666, *, dir_fd: int | None = None) -> int:
    """A descriptor of a regular file. Anything else is an `OSError`; a device is not even opened."""
    follows = not flags & os.O_NOFOLLOW
    try:
        _reject_irregular(os.stat(path, dir_fd=dir_fd, follow_symlinks=follows).st_mode, path)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    handle = os.open(path, flags | _SAFELY, mode, dir_fd=dir_fd)
    try:
        _reject_irregular(os.fstat(handle).st_mode, path)  # it may be another file than before
    except BaseException:
        os.close(handle)
        raise
    return handle


def opened(path: StrPath, mode: str = "rb", **options: Any) -> Any:
    """`open` for regular files only. A write does not follow a symbolic link."""
    nofollow = 0 if mode.startswith("r") and "+" not in mode else os.O_NOFOLLOW
    return open(path, mode, opener=lambda name, flags: open_regular(name, flags | nofollow), **options)


def read_regular(path: StrPath, most: int) -> bytes:
    """The content of a regular file, up to `most` bytes; of a longer one, the first `most` + 1."""
    with opened(path) as file:
        return bytes(file.read(min(most, os.fstat(file.fileno()).st_size) + 1))  # `read` allocates its argument


def write_text(path: StrPath, text: str) -> None:
    """Write a regular file, new or existing."""
    with opened(path, "w", encoding="utf-8") as file:
        file.write(text)


class PrivateFolder:
    """A directory of this user with mode 0700, as an open descriptor.

    No other user can write into it. A name in it is a file or folder of it, or an `OSError`.
    """

    def __init__(self, name: StrPath, *, parent: int | None = None, is_inner: bool = False) -> None:
        """Open it. `is_inner`: it is inside a private folder, which protects it whatever its own mode is."""
        self.name = os.fspath(name)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        self.handle = os.open(name, flags | _SAFELY, dir_fd=parent)
        try:
            found = os.fstat(self.handle)
            if found.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}", self.name)
            if not is_inner and found.st_mode & 0o777 != 0o700:  # setgid comes from the folder that it was made in
                what = f"its mode is {stat.S_IMODE(found.st_mode):04o}, not 0700"
                raise PermissionError(errno.EPERM, what, self.name)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the descriptor."""
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)

    def names(self) -> list[str]:
        """The names of its entries, sorted."""
        return sorted(os.listdir(self.handle))

    def folder(self, name: str) -> PrivateFolder:
        """Open a folder in it."""
        return PrivateFolder(_plain(name), parent=self.handle, is_inner=True)

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of a regular file in it that belongs to this user and has no other hard link."""
        handle = open_regular(_plain(name), flags | os.O_NOFOLLOW, 0o600, dir_fd=self.handle)
        found = os.fstat(handle)
        if found.st_uid != os.geteuid() or found.st_nlink != 1:
            os.close(handle)
            what = f"it belongs to user {found.st_uid} and has {found.st_nlink} names"
            raise PermissionError(errno.EPERM, what, f"{self.name}/{name}")
        return handle

    def read(self, name: str, most: int) -> bytes:
        """The content of a file in it; `OSError` if it has more than `most` bytes."""
        with os.fdopen(self.open(name), "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > most:
                raise OSError(errno.EFBIG, f"it must have at most {most:,} bytes, got {size:,}", name)
            return file.read(size)

    def write(self, name: str, text: bytes) -> None:
        """Write or replace a file in it. A full disk or a kill leaves the old content or the new one."""
        with suppress(OSError):
            if self.read(name, len(text)) == text:
                return
        part = f".{_plain(name)}.part"
        with suppress(FileNotFoundError):  # a killed process may have left it
            os.unlink(part, dir_fd=self.handle)
        try:
            with os.fdopen(self.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(text)
            os.rename(part, name, src_dir_fd=self.handle, dst_dir_fd=self.handle)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=self.handle)
            raise

    def remove_all(self) -> None:
        """Remove its entries, as far as possible. Links are removed, their targets are not."""
        for name in self.names():
            try:
                if stat.S_ISDIR(os.stat(name, dir_fd=self.handle, follow_symlinks=False).st_mode):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=self.handle)
                else:
                    os.unlink(name, dir_fd=self.handle)
            except OSError:
                continue


@contextmanager
def shared_folder(path: Path) -> Iterator[int]:
    """A descriptor of a directory in which no other user can replace this user's files; else `PermissionError`."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _SAFELY)
    try:
        found = os.fstat(handle)
        if found.st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}, who can replace files", str(path))
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            what = "other users can write to it and replace files (it has no sticky bit)"
            raise PermissionError(errno.EPERM, what, str(path))
        yield handle
    finally:
        os.close(handle)


def _reject_irregular(mode: int, path: StrPath) -> None:
    if not stat.S_ISREG(mode):
        what = next((word for is_kind, word in _KINDS if is_kind(mode)), "something else")
        kind = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(kind, f"it must be a regular file, got {what}", os.fspath(path))


def _plain(name: str) -> str:
    """Check that a name has no path in it."""
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise OSError(errno.EINVAL, "it must be a name without a path", repr(name))
    return name


def read_small(path: str | os.PathLike[str]) -> str:
    """The text of a file of the kernel, in a third of the time that `Path.read_text` takes. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 2**16):
            parts.append(part)
        return b"".join(parts).decode(errors="replace")
    finally:
        os.close(descriptor)
