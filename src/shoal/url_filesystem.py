"""The file system behind a URL, by fsspec."""

from __future__ import annotations

from typing import Any

from shoal.errors import ShoalError, nearest


def url_filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it; `LookupError` if the protocol is unknown."""
    import fsspec  # type: ignore[import-untyped]  # some 0.1 s, only where it is needed

    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or url.partition("://")[0]
        raise ShoalError(
            f"{url} needs the package {package}: {error}", fix=f"pip install {package}", code="R027"
        ) from error
    except ValueError as error:
        raise LookupError(str(error)) from error  # not a ValueError, which every ShoalError is
    return system, str(path)


def nearest_protocol(url: str) -> str:
    """Return the known protocol that is spelled most like that of a URL."""
    import fsspec

    return nearest(url.partition("://")[0], fsspec.available_protocols()) or "s3"
