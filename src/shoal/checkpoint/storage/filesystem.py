"""The file system operations of a checkpoint: few, and each may fail.

A save is safe if killing the process before any one of them leaves the previous checkpoint intact. All operations that
change something are counted here, in an order that is the same every time. So a test can kill the process before each,
and do worse: see `shoal.blueprint.faults`.

Paths are names. This class uses the local disk; `shoal.checkpoint.storage.object_store` has one for object stores.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from shoal.blueprint.faults import Fault, Faults
from shoal.files import open_regular, opened, read_regular
from shoal.observe.durable_write import make_directory, sync

Buffer = bytes | memoryview
_MOST_PARTS = 512
"""Buffers per system call; 1024 is the guaranteed minimum of the limit."""


class Source(Protocol):
    """A file that several threads read at a time."""

    size: int
    block: int
    """Bytes that are best read at a time."""

    def read_into(self, begin: int, view: memoryview) -> int:
        """Fill memory from the file at an offset; return the number of bytes read."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class Filesystem:
    """A file system, operation by operation; each is durable when it returns, or is followed by a `sync`."""

    renames = True
    """Whether renaming a directory is atomic."""
    reads_at_once = 4
    """Threads that read, and hash what they have read."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.count = 0
        self.saves = 0
        self._step: int | None = None
        self._before_save = 0
        self._faults = faults
        self._is_to_corrupt = False
        self._lasting: set[Path] = set()
        """Directories whose names, with their parents', are known to be on the disk."""

    # ---- operations that change something; each is counted -----------------------------------------------------------

    def make(self, path: Path) -> None:
        """Create a directory with its parents; all of them survive a power loss."""
        self._may_fail(path)
        self._make_lasting(path)

    def make_draft(self, path: Path) -> None:
        """Create a directory that will be renamed or removed, and may be lost until then."""
        self._may_fail(path)
        path.mkdir(exist_ok=True)

    def create(self, path: Path, num_bytes: int = 0) -> Any:
        """Create a file to write to. `num_bytes`: its size, if it is known."""
        self._may_fail(path)
        return opened(path, "wb", buffering=0)

    def write(self, file: Any, *parts: Buffer) -> None:
        """Append to the file."""
        failure = self._count()
        parts = self._as_ordered(parts)
        try:
            if failure:
                data = b"".join(parts)
                self._put(file, [memoryview(data[: len(data) // 2])])
                raise failure.error(_name(file))
            self._put(file, [memoryview(part) for part in parts if len(part)])
        except OSError as error:
            error.filename = error.filename or _name(file)  # a failed write does not name its file
            raise

    def close(self, file: Any) -> None:
        """Close the file; all of it is on the disk afterwards."""
        try:
            self._may_fail(_name(file))
            os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or _name(file)
            raise
        finally:
            file.close()

    def put(self, path: Path, text: bytes) -> None:
        """Write a small file."""
        file = self.create(path)
        try:
            self.write(file, text)
        except BaseException:
            self.give_up(file)
            raise
        self.close(file)

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically."""
        self._may_fail(old)
        old.rename(new)

    def sync(self, path: Path) -> None:
        """Make changes to a directory's names, or to a file's content, durable."""
        self._may_fail(path)
        sync(path)

    def remove(self, path: Path) -> None:
        """Remove a file, or a directory with its content."""
        self._may_fail(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    # ---- operations that change nothing ------------------------------------------------------------------------------

    def give_up(self, file: Any) -> None:
        """Close a file that is not finished."""
        file.close()

    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory; none, if it does not exist."""
        return sorted(os.listdir(directory)) if directory.is_dir() else []

    def has(self, path: Path) -> bool:
        """Whether a file exists."""
        return path.is_file()

    def size(self, path: Path) -> int:
        """Return the bytes of a file."""
        return path.stat().st_size

    def modified(self, path: Path) -> float:
        """Return when a file was written, in seconds since 1970."""
        return path.lstat().st_mtime

    def read(self, path: Path, most: int) -> bytes:
        """Read a file, up to `most` bytes."""
        return read_regular(path, most)[:most]

    def open(self, path: Path) -> Source:
        """Open a file for reading."""
        return _Local(path)

    def free(self, path: Path) -> int | None:
        """Return the bytes that can still be written below a path. None: unknown."""
        while not path.is_dir() and path != path.parent:
            path = path.parent
        return shutil.disk_usage(path).free

    def probe(self, directory: Path) -> None:
        """Write something below a directory and remove it again; raise if that fails."""
        self._make_lasting(directory)  # saves the first save this work
        path = directory / self._probe_name()
        try:
            with opened(path, "xb") as file:
                file.write(b"shoal")
        finally:
            path.unlink(missing_ok=True)

    def take_notes(self, where: str) -> list[str]:
        """Return messages for the user about this file system since the last call."""
        return []

    def _make_lasting(self, path: Path) -> None:
        if path not in self._lasting or not path.is_dir():
            make_directory(path)
            self._lasting.add(path)

    def _probe_name(self) -> str:
        return f".draft-probe-{secrets.token_hex(8)}"

    # ---- faults ------------------------------------------------------------------------------------------------------

    def saving(self, step: int, *, again: bool = False) -> None:
        """Assign the following operations to the save of a step; a new save, if the step is another one or `again`."""
        if again or step != self._step:
            self._step, self._before_save = step, self.count
            self.saves += 1

    def _may_fail(self, path: object) -> None:
        """Count an operation, and fail if a fault was injected for it."""
        if failure := self._count():
            raise failure.error(path)

    def _count(self) -> Fault | None:
        """Count an operation, and carry out an injected fault; return how it must fail, if it must."""
        self.count += 1
        if self._faults is None:
            import torch.distributed as dist  # here, so that inspecting a checkpoint needs no torch

            self._faults = Faults.here(dist.get_rank() if dist.is_initialized() else 0)
        if not self._faults.ordered:
            return None
        if self._due("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault := self._due("slow_disk_at"):
            time.sleep(fault.seconds if fault.seconds is not None else 1.0)
        self._is_to_corrupt |= self._due("corrupt_at") is not None
        return self._due("disk_full_at")

    def _as_ordered(self, parts: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        """Return the data to write: unchanged, or with one bit in the middle flipped by an injected fault."""
        if not self._is_to_corrupt:
            return parts
        self._is_to_corrupt, changed = False, bytearray(b"".join(parts))
        changed[len(changed) // 2] ^= 1
        return (bytes(changed),)

    def _due(self, kind: str) -> Fault | None:
        assert self._faults is not None
        return self._faults.due(
            kind,
            step=self._step,
            write=self.count,
            save=self.saves,
            write_of_save=self.count - self._before_save,
        )

    def _put(self, file: BinaryIO, parts: Sequence[memoryview]) -> None:
        """Write all parts, and let the disk start on them."""
        handle, left = file.fileno(), list(parts)
        begin = os.lseek(handle, 0, os.SEEK_CUR)
        while left:
            written = os.writev(handle, left[:_MOST_PARTS])
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]
        if hasattr(os, "posix_fadvise"):
            # "Not needed" makes the system write dirty pages now, in the background, and not all of them in fsync.
            os.posix_fadvise(handle, begin, 0, os.POSIX_FADV_DONTNEED)


class _Local:
    """A local file."""

    block = 4 * 2**20

    def __init__(self, path: Path) -> None:
        self._handle = open_regular(path)
        self.size = os.fstat(self._handle).st_size

    def read_into(self, begin: int, view: memoryview) -> int:
        done = 0
        while done < len(view) and (count := os.preadv(self._handle, [view[done:]], begin + done)):
            done += count
        return done

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _name(file: Any) -> str:
    return str(getattr(file, "name", None) or getattr(file, "path", ""))
