"""Object stores, and other URLs of fsspec: `s3://bucket/run`, `gs://...`, `memory://...`.

They have no rename and no directories, but an object appears completely or not at all. So the files of a step have
their final names from the start, and its manifest, written last, makes it a step. Files are read by ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.blueprint.faults import Faults
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.errors import ShoalError
from shoal.url_filesystem import nearest_protocol, url_filesystem

LOCAL = ("file", "local")
"""Protocols of the local disk, which guarantees more than fsspec requires."""


def filesystem_at(where: str | Path) -> tuple[Filesystem, Path]:
    """Return the file system of a path or a URL, and its name there."""
    protocol, is_url, rest = str(where).partition("://")
    if not is_url:
        return Filesystem(), Path(where)
    if protocol in LOCAL:
        return Filesystem(), Path(rest)
    try:
        system, path = url_filesystem(str(where))
    except LookupError as error:
        fix = f"{nearest_protocol(str(where))}://..."
        raise ShoalError(f"{where} cannot be opened: {error}", fix=fix, code="C016") from error
    return ObjectStore(system), Path(path)


class ObjectStore(Filesystem):
    """A file system of fsspec, possibly without rename and directories."""

    renames = False

    def __init__(self, system: Any, faults: Faults | None = None) -> None:
        super().__init__(faults)
        self.system = system

    def make(self, path: Path) -> None:
        """Create a directory, if the store has them."""
        self._may_fail(path)
        self.system.makedirs(str(path), exist_ok=True)

    def make_draft(self, path: Path) -> None:
        """Create a directory, if the store has them."""
        self.make(path)

    def create(self, path: Path) -> Any:
        """Create an object; it appears when it is closed."""
        self._may_fail(path)
        return self.system.open(str(path), "wb")

    def _put(self, file: Any, parts: Sequence[memoryview]) -> None:
        for part in parts:
            file.write(part)

    def close(self, file: Any) -> None:
        """Close the object, which then exists completely."""
        try:
            self._may_fail(getattr(file, "path", ""))
        except OSError:
            self.give_up(file)
            raise
        file.close()

    def put(self, path: Path, text: bytes) -> None:
        """Write a small object atomically."""
        self._may_fail(path)
        self.system.pipe_file(str(path), b"".join(self._as_ordered((text,))))

    def rename(self, old: Path, new: Path) -> None:
        """Raise: it would be a copy."""
        raise AssertionError(f"{old} cannot be renamed")

    def sync(self, path: Path) -> None:
        """Do nothing: a closed object is durable."""

    def remove(self, path: Path) -> None:
        """Remove an object, or all objects below a name."""
        self._may_fail(path)
        with suppress(FileNotFoundError):
            self.system.rm(str(path), recursive=True)

    def give_up(self, file: Any) -> None:
        """Discard an unfinished object. If the store cannot, it is stored as it is: a step without a manifest does not
        count."""
        try:
            file.discard()
            file.closed = True
        except Exception:
            with suppress(Exception):
                file.close()

    def names(self, directory: Path) -> list[str]:
        """Return the names in a directory; none, if it does not exist."""
        self.system.invalidate_cache()
        try:
            found = {Path(path).name for path in self.system.ls(str(directory), detail=False)}
        except FileNotFoundError:
            return []
        return sorted(found - {directory.name})  # some stores list an object for the directory itself

    def has(self, path: Path) -> bool:
        """Whether an object exists."""
        self.system.invalidate_cache()
        return bool(self.system.isfile(str(path)))

    def size(self, path: Path) -> int:
        """Return the bytes of an object."""
        return int(self.system.size(str(path)))

    def read(self, path: Path, most: int) -> bytes:
        """Read an object, up to `most` bytes."""
        return bytes(self.system.cat_file(str(path), start=0, end=most))

    def open(self, path: Path) -> _Object:
        """Open an object for reading."""
        return _Object(self.system, str(path))

    def free(self, path: Path) -> int | None:
        """Return None: unknown."""
        return None

    def probe(self, directory: Path) -> None:
        """Store something and remove it again; raise if that fails."""
        path = str(directory / self._probe_name())
        self.system.makedirs(str(directory), exist_ok=True)
        self.system.pipe_file(path, b"shoal")
        self.system.rm(path)


class _Object:
    """An object that several threads read at a time."""

    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path
        self.size = int(system.size(path))

    def read_into(self, begin: int, view: memoryview) -> int:
        try:
            data = self._system.cat_file(self._path, start=begin, end=begin + len(view))
        except OSError:
            raise
        except Exception as error:  # each store raises its own kind
            raise OSError(f"{type(error).__name__}: {error}") from error
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Do nothing."""
