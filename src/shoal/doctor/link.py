"""One connection between two hosts: does it open at a free port, do large messages arrive, how fast.

    connecting host                 listening host
    token, length (20 bytes)  ───►  a wrong token: close
                              ◄───  1 byte: the small message has arrived
    4 MiB, three times        ───►
                              ◄───  1 byte each: all has arrived

A link with a wrong MTU, or a firewall that drops large packets, passes the first and hangs in the second.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import queue
import secrets
import socket
import struct
import threading
import time
from typing import Any

from shoal.comm.rendezvous.network_interface import interface_towards
from shoal.launch.hosts.messages import Ended, read_exactly

LENGTH = 4 * 2**20
TRIES = 3
"""Large messages, of which the fastest counts: other programs may have the cores for a moment."""
TOKEN = 16
SECONDS = 4.0
"""The longest wait for a connection, and for the messages."""


def listen(token: bytes) -> int:
    """Open a free port, and answer connections that know the token until the process ends; returns the port."""
    server = socket.create_server(("", 0), backlog=64)
    threading.Thread(target=_serve, args=(server, token), daemon=True).start()
    return int(server.getsockname()[1])


def _serve(server: socket.socket, token: bytes) -> None:
    while True:
        connection, _ = server.accept()
        threading.Thread(target=_answer, args=(connection, token), daemon=True).start()


def _answer(connection: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError, Ended), connection:
        connection.settimeout(SECONDS)
        head = read_exactly(connection, TOKEN + 4)
        if not hmac.compare_digest(head[:TOKEN], token):
            return
        connection.sendall(b"s")
        for _ in range(TRIES):
            left = min(LENGTH, struct.unpack("<I", head[TOKEN:])[0])
            while left and (data := connection.recv(min(left, 2**16))):
                left -= len(data)
            if left:
                return
            connection.sendall(b"l")


def _address(name: str, port: int) -> str:
    """The address of a host. A name server that does not answer holds a thread, not this process."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            found.put(socket.getaddrinfo(name, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            found.put(error)

    threading.Thread(target=resolve, daemon=True).start()
    try:
        address = found.get(timeout=SECONDS)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(address, Exception):
        raise address
    return str(address)


def reach(name: str, port: int, token: bytes) -> dict[str, Any]:
    """Connect to a host by its name, and send a small and a large message.

    failed     empty, or name, connect, small, large: how far it came
    why        the error
    address    that of the host, as this host resolves its name
    interface  that of this host on the way; empty: unknown
    seconds    for a small message and its answer; rate: bytes a second of the large one
    """
    said: dict[str, Any] = {"failed": "name", "why": "", "address": "", "interface": "", "seconds": 0.0, "rate": 0.0}
    try:
        said["address"] = _address(name, port)
        said["interface"] = interface_towards(said["address"]) or ""
        if ipaddress.ip_address(said["address"]).is_loopback:
            return {**said, "why": "it is the loopback of this host"}
        said["failed"] = "connect"
        with socket.create_connection((said["address"], port), timeout=SECONDS) as connection:
            said["failed"] = "small"
            began = time.perf_counter()
            connection.sendall(token + struct.pack("<I", LENGTH))
            read_exactly(connection, 1)
            said["seconds"] = time.perf_counter() - began
            said["failed"] = "large"
            data = secrets.token_bytes(2**16) * (LENGTH // 2**16)
            for _ in range(TRIES):
                began = time.perf_counter()
                connection.sendall(data)
                read_exactly(connection, 1)
                said["rate"] = max(said["rate"], LENGTH / (time.perf_counter() - began))
    except TimeoutError:
        return {**said, "why": f"no answer for {SECONDS:g} s"}
    except (OSError, UnicodeError, Ended) as error:
        return {**said, "why": getattr(error, "strerror", None) or str(error)}
    return {**said, "failed": ""}
