"""The file system of a path or a URL: the local disk, S3, or another store of fsspec."""

from __future__ import annotations

from pathlib import Path

from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.object_store import ObjectStore
from shoal.checkpoint.storage.s3 import S3
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
    if hasattr(system, "call_s3"):
        return S3(system), Path(path)
    return ObjectStore(system), Path(path)
