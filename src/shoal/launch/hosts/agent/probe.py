"""Find out whether hosts reach each other before ranks wait for each other in vain.

Ranks connect directly, at ports that are free on their hosts. A firewall that lets agents reach the coordinator may
drop these connections, and gloo would wait for its timeout. So each agent opens one free port for a moment, and each of
the others connects to it. No data is sent; each accepted connection is closed at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from dataclasses import dataclass, field

from shoal.comm.rendezvous.network_interface import address_of
from shoal.launch.hosts.messages import Message

SECONDS = 4.0


@dataclass(slots=True)
class Probe:
    """A port for other hosts, and the attempts to reach theirs."""

    listening: socket.socket | None = None
    pending: dict[socket.socket, str] = field(default_factory=dict)
    """Connection that is being made → the name of its host."""
    failed: list[list[str]] = field(default_factory=list)
    """Names of hosts that were not reached, and why."""
    deadline: float = 0.0
    generation: int = 0

    def listen(self, own_address: str, generation: int) -> Message:
        """Open a free port at the address that ranks of this host will use."""
        self.close()
        self.generation = generation
        address = address_of(os.environ.get("GLOO_SOCKET_IFNAME", "")) or own_address
        self.listening = socket.create_server((address, 0), backlog=64)
        self.listening.setblocking(False)
        port = self.listening.getsockname()[1]
        return {"say": "listening", "generation": generation, "address": address, "port": port}

    def reach(self, targets: list[list[object]]) -> None:
        """Start to connect to the ports of other hosts."""
        self.deadline = time.monotonic() + SECONDS
        for name, address, port in targets:
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            connection.setblocking(False)
            number = connection.connect_ex((str(address), int(str(port))))
            self.pending[connection] = f"{name} at {address}:{port}"
            if number not in (0, errno.EINPROGRESS):
                self._fail(connection, os.strerror(number))

    def sources(self) -> list[socket.socket]:
        """The sockets to wait for: readable the first, writable the others."""
        return [*([self.listening] if self.listening is not None else []), *self.pending]

    def turn(self, ready: set[object]) -> Message | None:
        """Handle ready sockets; returns the report when every attempt has ended."""
        if self.listening is not None and self.listening in ready:
            with contextlib.suppress(OSError):
                self.listening.accept()[0].close()
        if not self.deadline:
            return None
        for connection in [each for each in self.pending if each in ready]:
            number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self._fail(connection, os.strerror(number))
            else:
                del self.pending[connection]
                connection.close()
        if time.monotonic() > self.deadline:
            for connection in list(self.pending):
                self._fail(connection, f"no answer for {SECONDS:g} s")
        if self.pending:
            return None
        self.deadline = 0.0
        failed, self.failed = self.failed, []
        return {"say": "reached", "generation": self.generation, "failed": failed}

    def _fail(self, connection: socket.socket, why: str) -> None:
        self.failed.append([self.pending.pop(connection), why])
        connection.close()

    def close(self) -> None:
        """Close all sockets."""
        for each in self.sources():
            each.close()
        self.listening, self.pending = None, {}
