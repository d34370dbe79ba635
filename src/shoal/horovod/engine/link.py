"""Connections of the control plane: rank 0 listens, every other rank connects and both prove the run's secret.

Messages are a length of four bytes and JSON. gloo could carry them, but a gloo receive has one sender and a timeout;
rank 0 has to wait for whichever rank comes first, for as long as it takes.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.comm.rendezvous.mac import TAG, mac
from shoal.errors import RunFailed

LIMIT = 64 * 2**20
"""Maximum bytes of one message."""
_HEAD, _NONCE, _RANK = 4, 16, 4
_HANDSHAKE_SECONDS = 10.0


@dataclass(slots=True)
class Link:
    """One connection, over which whole messages are sent by any thread and received by one."""

    socket: socket.socket
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, data: bytes) -> None:
        """Send one message. Raises OSError if the connection is closed."""
        with self._lock:
            self.socket.sendall(len(data).to_bytes(_HEAD, "big") + data)

    def receive(self) -> bytes | None:
        """Wait for a message; None: the other end has closed the connection."""
        head = self._exactly(_HEAD)
        if head is None:
            return None
        length = int.from_bytes(head, "big")
        return self._exactly(length) if 0 < length <= LIMIT else None

    def _exactly(self, length: int) -> bytes | None:
        data = bytearray()
        while len(data) < length:
            try:
                part = self.socket.recv(min(length - len(data), 2**20))
            except OSError:
                return None
            if not part:
                return None
            data += part
        return bytes(data)

    def close(self) -> None:
        """Close the connection, and wake the thread that receives."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


def accept_ranks(server: socket.socket, size: int, secret: bytes, timeout: float) -> dict[int, Link]:
    """Accept a connection of every other rank; a process without the secret is sent away."""
    links: dict[int, Link] = {}
    deadline = time.monotonic() + timeout
    while len(links) < size - 1:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = sorted(set(range(1, size)) - set(links))
            what = f"ranks {missing} did not connect to rank 0 within {timeout:g} s"
            raise RunFailed(what, fix="start all ranks, and call hvd.init() on each of them", code="H020") from None
        rank = _admitted(connection, secret)
        if rank is None or rank in links or not 0 < rank < size:
            connection.close()
        else:
            links[rank] = Link(connection)
    return links


def connect(address: tuple[str, int], rank: int, secret: bytes, timeout: float) -> Link:
    """Connect to rank 0, and prove to each other that both belong to this run."""
    connection = socket.create_connection(address, timeout=timeout)
    nonce = secrets.token_bytes(_NONCE)
    link = Link(connection)
    connection.sendall(rank.to_bytes(_RANK, "big") + nonce)
    answer = link._exactly(_NONCE + TAG)
    if answer is None or not hmac.compare_digest(answer[_NONCE:], mac(secret, "rank 0", nonce, answer[:_NONCE], rank)):
        connection.close()
        what = f"the process at {address[0]}:{address[1]} is not rank 0 of this run"
        raise RunFailed(what, fix="export MASTER_PORT=<another port> on every rank", code="H021")
    connection.sendall(mac(secret, "rank", answer[:_NONCE], nonce, rank))
    return _ready(link)


def receive_all(link: Link, handle: Callable[[bytes], None]) -> None:
    """Handle messages until the connection ends."""
    while (data := link.receive()) is not None:
        handle(data)


def _admitted(connection: socket.socket, secret: bytes) -> int | None:
    """Return the rank at the other end; None if it has no secret."""
    connection.settimeout(_HANDSHAKE_SECONDS)
    link = Link(connection)
    head = link._exactly(_RANK + _NONCE)
    if head is None:
        return None
    rank, theirs, nonce = int.from_bytes(head[:_RANK], "big"), head[_RANK:], secrets.token_bytes(_NONCE)
    with suppress(OSError):
        connection.sendall(nonce + mac(secret, "rank 0", theirs, nonce, rank))
    proof = link._exactly(TAG)
    if proof is None or not hmac.compare_digest(proof, mac(secret, "rank", nonce, theirs, rank)):
        return None
    _ready(link)
    return rank


def _ready(link: Link) -> Link:
    link.socket.settimeout(None)
    link.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link
