"""Files of an fsspec URL: `s3://bucket/shards`, `gs://...`, `memory://...`. A `*` in the URL matches names."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from shoal.data.sources.remote.listing import Listing, RemoteFile
from shoal.errors import ShoalError
from shoal.url_filesystem import nearest_protocol, url_filesystem

VERSIONS = ("ETag", "etag", "version_id", "generation", "LastModified", "last_modified", "mtime", "created")
"""Keys of fsspec's file systems, best first."""


class ObjectStore:
    """A file system of fsspec."""

    def __init__(self, url: str) -> None:
        try:
            self._system, self._path = url_filesystem(url)
        except LookupError as error:
            fix = f"--data.source {nearest_protocol(url)}://..."
            raise ShoalError(f"{url} cannot be read: {error}", fix=fix, code="D091") from error

    def list(self) -> Listing:
        """The file, all files below the folder, or all that a pattern matches."""
        self._system.invalidate_cache()
        path = self._path.rstrip("/")
        if "*" in path:
            folder = path[: path.index("*")].rpartition("/")[0]
            found = self._system.glob(path, detail=True)
        elif self._system.isfile(path):
            return Listing([_file(path.rpartition("/")[2], path, self._system.info(path))], is_one_file=True)
        else:
            folder, found = path, self._system.find(path, detail=True)
        files = [
            _file(place.removeprefix(folder).removeprefix("/"), place, info)
            for place, info in found.items()
            if info.get("type", "file") == "file" and place.rstrip("/") != folder
        ]
        return Listing(files, is_one_file=False)

    def look_up(self, file: RemoteFile) -> RemoteFile:
        """The file as the store lists it now."""
        self._system.invalidate_cache()
        return _file(file.name, file.place, self._system.info(file.place))

    def open(self, file: RemoteFile) -> Any:
        """Read it from its beginning to its end, without a cache of blocks."""
        return self._system.open(file.place, "rb", cache_type="readahead", block_size=2**23)


def _file(name: str, place: str, info: Mapping[str, Any]) -> RemoteFile:
    size = info.get("size")
    return RemoteFile(
        name,
        place,
        int(size) if size is not None else None,
        next((f"{key} {_plain(info[key])}" for key in VERSIONS if info.get(key) is not None), None),
        _hex(info.get("md5Hash")),
    )


def _plain(version: Any) -> Any:
    """A version as text. A store may return a time as a number in a list, and as a datetime for a single file; an ETag
    without its quotes in a list, and with them for a single file."""
    if isinstance(version, str):
        return version.strip('"')
    return version.timestamp() if hasattr(version, "timestamp") else version


def _hex(md5: Any) -> str | None:
    try:
        return base64.b64decode(str(md5 or ""), validate=True).hex() or None
    except (binascii.Error, ValueError):
        return None
