"""The files at a URL: names below it, sizes and versions. All of these come from a server and may be hostile."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.data.sources.files import ENDINGS
from shoal.errors import ShoalError

MOST_FILES = 1_000_000
LONGEST_NAME = 200
"""Bytes of each part of a name; a temporary name has a few more."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a URL."""

    name: str
    """Its path below the URL."""
    place: str
    """Its own URL, or its path in the store."""
    size: int | None = None
    version: str | None = None
    """The kind of version, such as ETag, and its value. None: the server has none, and changes cannot be seen."""
    md5: str | None = None

    def is_other(self, now: RemoteFile) -> bool:
        """Whether the file was changed. A store may list one kind of version and return another for a single file;
        these cannot be compared."""
        kinds = [(version or "").partition(" ")[0] for version in (self.version, now.version)]
        return self.size != now.size or (kinds[0] == kinds[1] and self.version != now.version)


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a URL."""

    files: Sequence[RemoteFile]
    is_one_file: bool
    """Whether the URL names a file. False: it names a folder, which may hold a single one."""


class RemoteStore(Protocol):
    """Reads files at a URL."""

    def list(self) -> Listing:
        """The file at the URL, or all files below it."""

    def look_up(self, file: RemoteFile) -> RemoteFile:
        """The file as it is now."""

    def open(self, file: RemoteFile) -> Any:
        """A binary stream of its content."""


def checked(url: str, files: Sequence[RemoteFile], format: str) -> list[RemoteFile]:
    """The files to download, by name: of several, those with a known ending. Raises for unsafe names."""
    if len(files) > MOST_FILES:
        raise _unsafe(url, f"{len(files):,} files")
    for file in files:
        if not is_safe(file.name):
            raise _unsafe(url, f"the name {file.name[:100]!r}")
    found = sorted(files, key=lambda file: file.name)
    folders = {parent for file in found for parent in _parents(file.name)}
    if len({file.name for file in found}) < len(found) or any(file.name in folders for file in found):
        raise _unsafe(url, "the same name twice")
    if len(found) > 1:
        found = [file for file in found if _is_data(file.name, format)]
    if not found:
        raise ShoalError(
            f"{url} must have files of the format {format}, got {f'{len(files)} other files' if files else 'none'}",
            fix="--data.source URL of a file, or of a folder with data files",
            code="D094",
        )
    return found


def is_safe(name: str) -> bool:
    """Whether a name stays below its folder.

    >>> [is_safe(name) for name in ("a/b.bin", "../b.bin", "/b.bin", "a//b.bin", "", "a/./b")]
    [True, False, False, False, False, False]
    """
    parts = name.split("/")
    return all(
        part not in ("", ".", "..")
        and part.isprintable()
        and "\\" not in part
        and len(part.encode(errors="replace")) <= LONGEST_NAME
        for part in parts
    )


def _parents(name: str) -> Iterable[str]:
    parts = name.split("/")
    return ("/".join(parts[:number]) for number in range(1, len(parts)))


def _is_data(name: str, format: str) -> bool:
    """Whether a file may be of the format. Names with a dot in front are hidden, as on a disk."""
    if any(part.startswith(".") for part in name.split("/")):
        return False
    kinds = {"auto": list(ENDINGS), "chat": ["jsonl", "parquet"]}.get(format, [format])
    return any(posixpath.splitext(name)[1].lower() in ENDINGS[kind] for kind in kinds)


def _unsafe(url: str, what: str) -> ShoalError:
    return ShoalError(
        f"the listing of {url} must have plain names below it, got {what}; nothing was written",
        fix="--data.source URL of another store",
        code="D090",
    )
