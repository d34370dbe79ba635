"""Read parts of an object of S3 straight into memory.

A client of S3 in Python receives all answers on one thread, in small pieces, joins them, and the result is copied once
more. Here each request has a connection of its own, whose bytes arrive where they belong:

    s3fs      socket ─ small pieces, one thread ─ joined ─ copied to the tensor
    ranges    socket ─ the tensor's memory, as many threads as there are requests

This is only a shorter way: whatever goes wrong here, the client makes the request again, with its own patience, proxies
and certificates. What does not work at all (a proxy is needed, a certificate is not trusted) is not tried again.
"""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.request
from typing import Any
from urllib.parse import SplitResult, urlsplit

SECONDS_TO_CONNECT = 5.0
SECONDS_TO_ANSWER = 60.0
SECONDS_SIGNED = 3600
MOST_FAILURES = 3
"""Requests in a row that may fail, once one has worked."""


class Ranges:
    """Connections to the server of one store, kept from request to request while objects are open."""

    def __init__(self, system: Any) -> None:
        self._system = system
        self._lock = threading.Lock()
        self._idle: list[tuple[tuple[str, str], http.client.HTTPConnection]] = []
        """Connections that wait for a request, and where they lead."""
        self._num_open = self._num_failed = 0
        self.has_worked = False

    @property
    def is_off(self) -> bool:
        """Whether it does not work here."""
        return self._num_failed >= (MOST_FAILURES if self.has_worked else 1)

    def open(self, path: str) -> SplitResult | None:
        """The URL of an object, with a signature; None: the client reads it. Each call needs a `close`."""
        with self._lock:
            self._num_open += 1
        if self.is_off:
            return None
        try:
            url = _signed(self._system, path)
            if not _needs_more(self._system, url):
                return url
        except Exception:  # the client of another version, or credentials that it cannot get: it says so itself
            pass
        self._num_failed += 1
        return None

    def close(self) -> None:
        """Close an object; after the last one, all connections."""
        with self._lock:
            self._num_open -= 1
            if not self._num_open:
                left, self._idle = self._idle, []
                for _, connection in left:
                    connection.close()

    def read_into(self, url: SplitResult, begin: int, view: memoryview) -> bool:
        """Fill memory with a part of an object; False: the client has to read it."""
        if self.is_off:
            return False
        idle = self._take_idle(url)
        # A server closes connections that wait for long, so the second attempt has a new one.
        if (idle is not None and self._read(idle, url, begin, view)) or self._read(_new(url), url, begin, view):
            self._num_failed, self.has_worked = 0, True
            return True
        self._num_failed += 1
        return False

    def _read(self, connection: http.client.HTTPConnection, url: SplitResult, begin: int, view: memoryview) -> bool:
        try:
            is_read = _fill(connection, url, begin, view)
        except (OSError, http.client.HTTPException):
            is_read = False
        if is_read:
            with self._lock:
                self._idle.append(((url.scheme, url.netloc), connection))
        else:
            connection.close()
        return is_read

    def _take_idle(self, url: SplitResult) -> http.client.HTTPConnection | None:
        """An idle connection to that server."""
        with self._lock:
            for number, (place, connection) in enumerate(self._idle):
                if place == (url.scheme, url.netloc):
                    del self._idle[number]
                    return connection
        return None


def _new(url: SplitResult) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname or "", url.port, timeout=SECONDS_TO_CONNECT)


def _fill(connection: http.client.HTTPConnection, url: SplitResult, begin: int, view: memoryview) -> bool:
    """Whether all of the memory was filled."""
    if connection.sock is None:
        connection.connect()
        connected: socket.socket = connection.sock  # type: ignore[assignment]
        connected.settimeout(SECONDS_TO_ANSWER)
    end = begin + len(view) - 1
    target = f"{url.path}?{url.query}" if url.query else url.path
    connection.request("GET", target, headers={"Range": f"bytes={begin}-{end}", "Accept-Encoding": "identity"})
    answer = connection.getresponse()
    if not (answer.getheader("Content-Range") or "").startswith(f"bytes {begin}-{end}/"):
        return False  # an error, or all of the object
    at = 0
    while at < len(view) and (count := answer.readinto(view[at:])):
        at += count
    return at == len(view)


def _signed(system: Any, path: str) -> SplitResult:
    """The URL of an object. The client signs URLs in an old way, which many servers reject: so it is signed again."""
    from botocore.auth import S3SigV4QueryAuth  # type: ignore[import-not-found]
    from botocore.awsrequest import AWSRequest  # type: ignore[import-not-found]
    from fsspec.asyn import sync  # type: ignore[import-untyped]

    plain = system.url(path, expires=SECONDS_SIGNED).partition("?")[0]
    credentials = None if system.anon else sync(system.loop, _credentials, system)
    request = AWSRequest(method="GET", url=plain)
    if credentials is not None:
        S3SigV4QueryAuth(credentials, "s3", system.s3.meta.region_name, expires=SECONDS_SIGNED).add_auth(request)
    return urlsplit(str(request.url))


async def _credentials(system: Any) -> Any:
    found = await system.session.get_credentials()
    return None if found is None else await found.get_frozen_credentials()


def _needs_more(system: Any, url: SplitResult) -> bool:
    """Whether requests go through a proxy, or need more than a signature."""
    if (system.config_kwargs or {}).get("proxies") or system.req_kw or "verify" in (system.client_kwargs or {}):
        return True
    return url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.hostname or "")
