"""Find out whether hosts reach each other before ranks wait for each other in vain.

Ranks connect directly, at ports that are free on their hosts. A firewall that lets agents reach the coordinator may
drop these connections, and gloo would wait for its timeout. So each agent opens one free port for a moment, and each of
the others connects to it. No data is sent; each accepted connection is closed at once.

It also shows from which addresses ranks of other hosts will come. Each host reports its own; if a connection arrives
from another one, an address is translated on the way, and the ports of gloo cannot be closed to strangers. What a
stranger connects to this port from does not count.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from dataclasses import dataclass, field

from shoal.comm.rendezvous.listener_guard import Peers
from shoal.comm.rendezvous.network_interface import address_of, own_addresses
from shoal.launch.hosts.messages import Message

SECONDS = 4.0
BACKLOG = 4096
"""Connections that may wait to be accepted: strangers must not displace those of other hosts."""


@dataclass(slots=True)
class Probe:
    """A port for other hosts, and the attempts to reach theirs."""

    listening: socket.socket | None = None
    pending: dict[socket.socket, tuple[str, str]] = field(default_factory=dict)
    """Connection that is being made → the name of its host, and where it listens."""
    failed: list[list[str]] = field(default_factory=list)
    """Names of hosts that were not reached, and why."""
    deadline: float = 0.0
    generation: int = 0
    address: str = ""
    """Where this host has listened."""
    used: dict[str, str] = field(default_factory=dict)
    """Name of a host → the address from which this one has connected to it."""
    seen: set[str] = field(default_factory=set)
    """The addresses from which something has connected to this host."""

    def listen(self, own_address: str, generation: int) -> Message:
        """Open a free port at the address that ranks of this host will use."""
        self.close()
        self.generation, self.used, self.seen = generation, {}, set()
        self.address = address_of(os.environ.get("GLOO_SOCKET_IFNAME", "")) or own_address
        self.listening = socket.create_server((self.address, 0), backlog=BACKLOG)
        self.listening.setblocking(False)
        port = self.listening.getsockname()[1]
        return {"say": "listening", "generation": generation, "address": self.address, "port": port}

    def reach(self, targets: list[list[object]]) -> None:
        """Start to connect to the ports of other hosts."""
        self.deadline = time.monotonic() + SECONDS
        for name, address, port in targets:
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            connection.setblocking(False)
            number = connection.connect_ex((str(address), int(str(port))))
            self.pending[connection] = str(name), f"{address}:{port}"
            if number not in (0, errno.EINPROGRESS):
                self._fail(connection, os.strerror(number))

    def sources(self) -> list[socket.socket]:
        """The sockets to wait for: readable the first, writable the others."""
        return [*([self.listening] if self.listening is not None else []), *self.pending]

    def turn(self, ready: set[object]) -> Message | None:
        """Handle ready sockets; returns the report when every attempt has ended."""
        if self.listening is not None and self.listening in ready:
            self._accept(self.listening)
        if not self.deadline:
            return None
        for connection in [each for each in self.pending if each in ready]:
            number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                self._fail(connection, os.strerror(number))
            else:
                self.used[self.pending.pop(connection)[0]] = str(connection.getsockname()[0])
                connection.close()
        if time.monotonic() > self.deadline:
            for connection in list(self.pending):
                self._fail(connection, f"no answer for {SECONDS:g} s")
        if self.pending:
            return None
        self.deadline = 0.0
        failed, self.failed = self.failed, []
        addresses = sorted({*own_addresses(), self.address, *self.used.values()})
        report = {"say": "reached", "generation": self.generation, "failed": failed}
        return {**report, "used": self.used, "addresses": addresses}

    def _accept(self, listening: socket.socket) -> None:
        """Accept and close what has connected, and note from where."""
        with contextlib.suppress(OSError):
            for _ in range(BACKLOG):
                connection, where = listening.accept()
                connection.close()
                self.seen.add(str(where[0]))

    def _fail(self, connection: socket.socket, why: str) -> None:
        name, where = self.pending.pop(connection)
        self.failed.append([f"{name} at {where}", why])
        connection.close()

    def peers(self, claimed: Message | None) -> tuple[Peers | None, str]:
        """Return from where ranks of other hosts will connect, and if that is unknown, why.

        `claimed`: the addresses of all hosts, and those from which the others have connected to this one.
        """
        if claimed is None:
            return None, "not every host has connected to this one"
        unseen = sorted(set(claimed["used"]) - self.seen)
        if unseen:
            return None, f"a host has connected from {unseen[0]}, and its connection has not come from there"
        return Peers(tuple(claimed["addresses"]), self.address), ""

    def close(self) -> None:
        """Close all sockets, after those that have connected were noted."""
        if self.listening is not None:
            self._accept(self.listening)
        for each in self.sources():
            each.close()
        self.listening, self.pending = None, {}
