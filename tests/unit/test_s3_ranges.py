"""Parts of an object of S3 are read straight into memory, and by the client where that does not work."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import SplitResult, urlsplit

import pytest

from shoal.checkpoint.storage.s3_ranges import Ranges

DATA = bytes(range(256)) * 4096


class Server(BaseHTTPRequestHandler):
    """A server of one object, which may answer otherwise than S3 does."""

    protocol_version = "HTTP/1.1"
    way = "as S3"
    connections: set[Any]

    def do_GET(self) -> None:
        type(self).connections.add(self.client_address)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert found is not None
        begin, end = int(found[1]), min(int(found[2]), len(DATA) - 1)
        body = DATA[begin : end + 1] if self.way != "all of it" else DATA
        self.send_response({"rejects": 403, "all of it": 200, "as rclone": 200}.get(self.way, 206))
        if self.way not in ("rejects", "all of it"):
            self.send_header("Content-Range", f"bytes {begin}-{end}/{len(DATA)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.way == "cuts" else body)
        self.close_connection = self.way in ("cuts", "closes")

    def log_message(self, *_: Any) -> None:
        pass


Own = tuple[type[Server], SplitResult]


@pytest.fixture
def server() -> Iterator[Own]:
    own = type("Own", (Server,), {"connections": set()})
    with ThreadingHTTPServer(("127.0.0.1", 0), own) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield own, urlsplit(f"http://127.0.0.1:{found.server_port}/bucket/a%20b?X-Amz-Signature=1")
        found.shutdown()
        thread.join()


@pytest.fixture
def ranges() -> Iterator[Ranges]:
    found = Ranges(None)
    assert found.open("bucket/a") is None  # no client signs here
    found._num_failed = 0
    yield found
    found.close()
    assert not found._idle


def read(ranges: Ranges, url: SplitResult, begin: int, size: int) -> bytes | None:
    """The bytes; None: the client has to read them."""
    target = bytearray(size)
    return bytes(target) if ranges.read_into(url, begin, memoryview(target)) else None


@pytest.mark.parametrize("way", ["as S3", "as rclone"])
def test_parts_arrive_over_one_connection(server: Own, ranges: Ranges, way: str) -> None:
    own, url = server
    own.way = way
    for begin, size in ((0, 100_000), (123, 1), (len(DATA) - 7, 7), (0, len(DATA))):
        assert read(ranges, url, begin, size) == DATA[begin : begin + size]
    assert len(own.connections) == 1
    assert ranges.has_worked


@pytest.mark.parametrize("way", ["rejects", "all of it", "cuts"])
def test_a_server_that_does_otherwise_is_left_to_the_client(server: Own, ranges: Ranges, way: str) -> None:
    own, url = server
    own.way = way
    assert read(ranges, url, 0, 1000) is None
    assert ranges.is_off  # the first failed: it never works here
    own.way = "as S3"
    assert read(ranges, url, 0, 1000) is None
    assert len(own.connections) == 1


def test_after_it_has_worked_a_failure_is_not_the_end(server: Own, ranges: Ranges) -> None:
    own, url = server
    for way, is_read in (("as S3", True), ("cuts", False), ("cuts", False), ("as S3", True), ("cuts", False)):
        own.way = way
        assert (read(ranges, url, 5, 1000) == DATA[5:1005]) == is_read
    assert not ranges.is_off
    assert [read(ranges, url, 0, 1000) for _ in range(2)] == [None, None]
    assert ranges.is_off


def test_a_connection_that_the_server_has_closed_is_made_again(server: Own, ranges: Ranges) -> None:
    own, url = server
    own.way = "closes"
    for begin in range(0, 6000, 1000):
        assert read(ranges, url, begin, 1000) == DATA[begin : begin + 1000]
    assert len(own.connections) == 6
    assert not ranges._num_failed


def test_a_server_that_cannot_be_reached(ranges: Ranges) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    assert read(ranges, urlsplit(f"http://127.0.0.1:{port}/a"), 0, 10) is None
    assert ranges.is_off


def test_without_a_client_that_signs_there_is_no_url() -> None:
    ranges = Ranges(object())
    assert ranges.open("bucket/a") is None
    assert ranges.is_off
    ranges.close()
