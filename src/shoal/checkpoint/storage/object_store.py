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
from shoal.checkpoint.storage.retry import Requests
from shoal.url_filesystem import error_code


class ObjectStore(Filesystem):
    """A file system of fsspec, possibly without rename and directories."""

    renames = False
    reads_at_once = 8  # one connection alone is slow

    def __init__(self, system: Any, faults: Faults | None = None) -> None:
        super().__init__(faults)
        self.system = system
        self.requests = Requests()

    def request(self, function: Any, *words: Any, **named: Any) -> Any:
        """Call a function of the file system, patiently: see `shoal.checkpoint.storage.retry`."""
        return self.requests(function, *words, **named)

    def make(self, path: Path) -> None:
        """Create a directory, if the store has them."""
        self._may_fail(path)
        self.request(self.system.makedirs, str(path), exist_ok=True)

    def make_draft(self, path: Path) -> None:
        """Create a directory, if the store has them."""
        self.make(path)

    def create(self, path: Path, num_bytes: int = 0) -> Any:
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
        self.request(self.system.pipe_file, str(path), b"".join(self._as_ordered((text,))))

    def rename(self, old: Path, new: Path) -> None:
        """Raise: it would be a copy."""
        raise AssertionError(f"{old} cannot be renamed")

    def sync(self, path: Path) -> None:
        """Do nothing: a closed object is durable."""

    def remove(self, path: Path) -> None:
        """Remove an object, or all objects below a name."""
        self._may_fail(path)
        self.system.invalidate_cache()  # else objects that others have written would stay
        with suppress(FileNotFoundError):
            self.request(self.system.rm, str(path), recursive=True)

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
            found = {Path(path).name for path in self.request(self.system.ls, str(directory), detail=False)}
        except FileNotFoundError as error:
            if error_code(error) == "NoSuchBucket":
                raise
            return []
        return sorted(found - {directory.name})  # some stores list an object for the directory itself

    def has(self, path: Path) -> bool:
        """Whether an object exists. Raises if the store does not say: a step without a manifest is removed."""
        self.system.invalidate_cache()
        try:
            return bool(self.request(self.system.info, str(path))["type"] == "file")
        except (FileNotFoundError, NotADirectoryError):
            return False

    def size(self, path: Path) -> int:
        """Return the bytes of an object."""
        self.system.invalidate_cache()
        return int(self.request(self.system.size, str(path)))

    def modified(self, path: Path) -> float:
        """Return when an object was written, in seconds since 1970; 0: the store does not say."""
        with suppress(NotImplementedError):
            return float(self.request(self.system.modified, str(path)).timestamp())
        return 0.0

    def read(self, path: Path, most: int) -> bytes:
        """Read an object, up to `most` bytes."""
        return bytes(self.request(self.system.cat_file, str(path), start=0, end=most))

    def open(self, path: Path) -> StoredObject:
        """Open an object for reading."""
        return StoredObject(self, path)

    def free(self, path: Path) -> int | None:
        """Return None: unknown."""
        return None

    def probe(self, directory: Path) -> None:
        """Store something and remove it again; raise if that fails."""
        path = directory / self._probe_name()
        self.make(directory)
        self.request(self.system.pipe_file, str(path), b"shoal")
        self.request(self.system.rm_file, str(path))  # `rm` would not say that it is forbidden

    def take_notes(self, where: str) -> list[str]:
        """Return messages for the user about requests since the last call."""
        return self.requests.take_notes(where)


class StoredObject:
    """An object that several threads read at a time."""

    block = 16 * 2**20

    def __init__(self, store: ObjectStore, path: Path) -> None:
        self._store, self._path = store, str(path)
        self.size = store.size(path)

    def read_into(self, begin: int, view: memoryview) -> int:
        """Fill memory from the object at an offset; return the number of bytes read."""
        end = begin + len(view)
        data = self._store.request(self._store.system.cat_file, self._path, start=begin, end=end)
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Do nothing."""
