"""Serve the live page of one run to this machine alone: `/`, the page, and `/stream`, what changes in it.

It reads files of the run directory and nothing else. A request without the token, under a foreign name, or with another
method than GET is answered 403.
"""

from __future__ import annotations

import errno
import socketserver
import sys
import threading
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shoal.errors import ShoalError
from shoal.pages.html import data
from shoal.pages.live.access import Access, is_own_host
from shoal.pages.live.follow import Cursor
from shoal.pages.live.page import POLICY, live_page
from shoal.pages.live.watcher import Message, Watcher

POLL = 0.5
"""Seconds between two looks at the metrics."""
ALIVE = 15.0
"""Seconds after which an idle stream sends a comment, which fails once the browser has left."""
MOST_STREAMS = 16
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class WatchServer(ThreadingHTTPServer):
    """The server of one run, on the loopback address."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, path: Path, port: int = 0, access: Access | None = None) -> None:
        self.path, self.access = path, access or Access()
        self.page_seconds = 0.0
        """Processor time of the last page."""
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        self.ends = threading.Event()
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except (OSError, OverflowError) as error:
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            why = "another process uses it" if is_taken else getattr(error, "strerror", None) or str(error)
            what = f"port {port} of 127.0.0.1 cannot be served: {why}"
            raise ShoalError(what, fix="shoal watch without --port, which takes a free one", code="R070") from None

    def server_bind(self) -> None:
        """Bind without looking up the name of the host, which `HTTPServer` does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    @property
    def url(self) -> str:
        """The address with the token."""
        return f"http://127.0.0.1:{self.server_port}/?token={self.access.token}"

    def page(self) -> bytes:
        """The page as it is now."""
        began = time.thread_time()
        made = live_page(self.path).encode(errors="replace")
        self.page_seconds = time.thread_time() - began
        return made

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error of our own in one line. A browser that left in the middle is none."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            print(f"shoal watch: {type(error).__name__}: {error}", file=sys.stderr)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: WatchServer
    server_version, sys_version = "shoal", ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer with the page, the stream, or 403."""
        if not is_own_host(self.headers.get_all("Host", [])):
            return self._reject("this page is served under the names 127.0.0.1 and localhost alone")
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        if address.path == "/" and "token" in query:
            if self.server.access.takes_token(query["token"][0]):
                return self._answer(303, b"", {"Location": "/", "Set-Cookie": self.server.access.set_cookie})
            return self._reject("the token is not the one that `shoal watch` has printed")
        if not self.server.access.takes_cookie(self.headers.get("Cookie", "")):
            return self._reject("open the address that `shoal watch` has printed, with its token")
        if address.path == "/":
            return self._page()
        if address.path == "/stream":
            after = self.headers.get("Last-Event-ID") or query.get("after", [""])[0]
            return self._stream(Cursor.parse(after))
        return self._answer(404, b"there is no such page\n")

    def _page(self) -> None:
        try:
            made = self.server.page()
        except ShoalError as error:  # the directory was removed or replaced at this moment
            return self._answer(503, f"503: {error.problems[0].what}\n".encode(errors="replace"))
        return self._answer(200, made, {"Content-Type": "text/html; charset=utf-8"})

    def _reject(self, why: str) -> None:
        self._answer(403, f"403: {why}\n".encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the base class rejects, without repeating any of it. 501: its method is not GET."""
        if code == 501:
            return self._reject("only GET is answered")
        return self._answer(code, f"{int(code)}: the request cannot be read\n".encode())

    def _answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": "text/plain", **HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _stream(self, cursor: Cursor) -> None:
        """Send messages until the browser leaves or the server ends."""
        if not self.server.streams.acquire(blocking=False):
            return self._answer(503, b"too many pages are open\n")
        try:
            self.send_response(200)
            for name, value in {"Content-Type": "text/event-stream", **HEADERS}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"retry: 2000\n\n")
            self._follow(Watcher(self.server.path, cursor, lambda: self.server.page_seconds))
        except OSError:  # the browser has left
            pass
        finally:
            self.server.streams.release()

    def _follow(self, watcher: Watcher) -> None:
        said = time.monotonic()
        while not self.server.ends.wait(POLL):
            text = encoded(watcher.poll())
            if not text and time.monotonic() - said > ALIVE:
                text = b": alive\n\n"
            if text:
                self.wfile.write(text)
                said = time.monotonic()

    def log_message(self, format: str, *values: Any) -> None:
        """Print nothing: a line would have the token."""


def encoded(messages: Iterable[Message]) -> bytes:
    """Messages as a stream of server-sent events."""
    parts = []
    for message in messages:
        name = f"id: {message.id}\n" if message.id else ""
        parts.append(f"{name}event: {message.event}\ndata: {data(message.data)}\n\n")
    return "".join(parts).encode()
