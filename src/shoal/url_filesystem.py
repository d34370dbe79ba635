"""The file system behind a URL, by fsspec, and what its errors mean."""

from __future__ import annotations

from typing import Any

from shoal.errors import ShoalError, nearest

REFUSED = ("AccessDenied", "AllAccessDisabled", "ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403")
"""Codes of S3 for a request that needs other credentials, or other permissions."""
UNREACHABLE = ("ConnectionError", "HTTPClientError", "ClientConnectionError", "gaierror")
"""Classes of errors of connections, by name: fsspec's packages are not imported here."""


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


def error_code(error: BaseException) -> str:
    """Return the code of an answer of S3, such as `NoSuchBucket`; empty: there is none.

    s3fs raises an error of Python, and its cause has the answer."""
    for each in (error, error.__cause__):
        answer = getattr(each, "response", None)
        if isinstance(answer, dict):
            return str(answer.get("Error", {}).get("Code", ""))
    return ""


def is_of(error: BaseException, names: tuple[str, ...]) -> bool:
    """Whether an error is of a class with one of these names, or was caused by one."""
    classes = [kind for each in (error, error.__cause__) for kind in type(each).__mro__]
    return any(kind.__name__ in names for kind in classes)


def reason(error: BaseException) -> str:
    """Return what an error says, on one line."""
    if isinstance(error, OSError) and error.strerror:
        return str(error.strerror)
    code = error_code(error)
    if code:
        return f"{code}: {error}"
    return str(error) if type(error) is OSError else f"{type(error).__name__}: {error}"


def fix_of(url: str, error: BaseException) -> str | None:
    """Return what to type if a store rejects a request, or cannot be reached; None: nothing is known."""
    protocol, _, rest = url.partition("://")
    bucket = rest.partition("/")[0]
    if not protocol.startswith("s3"):
        return None
    if error_code(error) == "NoSuchBucket":
        return f"aws s3 mb s3://{bucket}, or the name of a bucket that exists"
    if is_of(error, ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")):
        return "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=..., or AWS_PROFILE=..., on every host"
    if error_code(error) in REFUSED or isinstance(error, PermissionError):
        may = f"a user that may list, read, write and delete in {bucket}"
        return f"export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... of {may}"
    if is_of(error, UNREACHABLE) or isinstance(error, ConnectionError):
        return "export AWS_ENDPOINT_URL=http://HOST:PORT, where the store answers"
    return None
