"""The list of downloaded files, in a file beside them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.data.sources.cache.folder import replaced
from shoal.data.sources.remote.listing import RemoteFile
from shoal.files import read_regular

MOST_BYTES = 2**30
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """Files of a URL that are in the cache. `files` grows while they are downloaded."""

    url: str
    job: str
    """The job that has listed the files; empty: the download was not finished."""
    when: str
    is_one_file: bool
    files: dict[str, list[Any]] = field(default_factory=dict)
    """Name → size and version at the URL, size and time of the local file."""
    version: int = VERSION

    def add(self, file: RemoteFile, folder: Path) -> None:
        """Add a file that is there."""
        found = (folder / "files" / file.name).stat()
        self.files[file.name] = [file.size, file.version, found.st_size, found.st_mtime_ns]

    def of_job(self, job: str) -> Manifest:
        """The same files, listed by another job."""
        return replace(self, job=job)

    def has(self, folder: Path, file: RemoteFile) -> bool:
        """Whether the local file is that of the listing. Without a version, a change could not be seen."""
        entry = self.files.get(file.name)
        is_same = entry is not None and entry[:2] == [file.size, file.version] and file.version is not None
        return is_same and self._is_there(folder, file.name)

    def is_whole(self, folder: Path) -> bool:
        """Whether all files were downloaded and are as they were written."""
        return bool(self.job) and bool(self.files) and all(self._is_there(folder, name) for name in self.files)

    def _is_there(self, folder: Path, name: str) -> bool:
        try:
            found = (folder / "files" / name).lstat()
        except OSError:
            return False
        return [found.st_size, found.st_mtime_ns] == self.files[name][2:]


def read_manifest(folder: Path, url: str) -> Manifest | None:
    """The list; None: there is none that can be used."""
    try:
        found = Manifest(**json.loads(read_regular(folder / "manifest.json", MOST_BYTES)))
        is_valid = found.version == VERSION and found.url == url and all(len(row) == 4 for row in found.files.values())
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return found if is_valid else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the list."""
    with replaced(folder / "manifest.json") as file:
        file.write(json.dumps(asdict(manifest)).encode())
