"""A proxy before a real server of S3 that can delay, refuse and cut requests."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

BUSY = "SlowDown", 503, "Please reduce your request rate."
FORBIDDEN = "AccessDenied", 403, "Access Denied"
Answer = tuple[str, int, str]


class Proxy(BaseHTTPRequestHandler):
    """Sends requests on to the server, unless `rule` says otherwise."""

    protocol_version = "HTTP/1.1"
    server_port: ClassVar[int]
    rule: ClassVar[Callable[[str, str], Answer | str | None]]
    """(Method, path with query) → an error to answer; "cut" the connection; "hold" it until the client has gone."""
    seen: ClassVar[list[tuple[str, str]]] = []
    most_at_once: ClassVar[int] = 0
    _now: ClassVar[int] = 0
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def do_GET(self) -> None:
        cls = type(self)
        with self._lock:
            cls.seen.append((self.command, self.path))
            verdict = cls.rule(self.command, self.path)
            cls._now += 1
            cls.most_at_once = max(cls.most_at_once, cls._now)
        try:
            self._answer(verdict)
        finally:
            with self._lock:
                cls._now -= 1

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _answer(self, verdict: Answer | str | None) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if verdict == "cut":
            self.rfile.read(size // 2)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        body = self.rfile.read(size)
        if verdict == "hold":
            self.connection.recv(1)  # nothing comes but the end
            self.close_connection = True
        elif isinstance(verdict, tuple):
            code, status, message = verdict
            self._send(status, {}, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())
        else:
            self._send(*self._asked(body))

    def _asked(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        onward = http.client.HTTPConnection("127.0.0.1", self.server_port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        try:
            onward.request(self.command, self.path, body=body or None, headers=headers)
            with onward.getresponse() as answer:
                return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            onward.close()

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        length = headers.get("Content-Length", "0") if is_head else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if not is_head:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Clients that were killed leave broken connections."""


@contextmanager
def proxy(server_port: int) -> Iterator[type[Proxy]]:
    """A proxy before the server; its `rule` may be changed at any time."""

    class Own(Proxy):
        seen: ClassVar[list[tuple[str, str]]] = []

    Own.server_port = server_port
    Own.rule = staticmethod(lambda *_: None)  # type: ignore[assignment]
    server = _Quiet(("127.0.0.1", 0), Own)
    Own.port = server.server_port  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Own
    finally:
        server.shutdown()
        server.server_close()
