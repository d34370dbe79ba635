"""A listening socket at which peers prove that they hold a key. Strangers get nothing, and cannot keep others out."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shoal.launch.hosts.messages import Channel, Ended, Stranger, WrongKey

MOST_STRANGERS = 64
"""Connections without a proof at one time. The oldest one of the address that has most of them gives way."""
MOST_ACCEPTED = 16
"""Connections that are accepted in one turn."""
MOST_LOGGED = 5
"""Rejections of one address for one reason that are printed."""


@dataclass(slots=True)
class Listener:
    """A listening socket, and the connections at it that have not proven anything yet."""

    listening: socket.socket
    key: bytes = field(repr=False)
    say: Callable[[str], None]
    rejected: set[str] = field(default_factory=set)
    """The addresses of processes with a wrong key."""
    strangers: list[Stranger] = field(default_factory=list)
    _num_rejected: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Address and reason → rejected connections."""

    def __post_init__(self) -> None:
        self.listening.setblocking(False)

    def sources(self) -> Iterator[socket.socket]:
        """The sockets to wait for."""
        yield self.listening
        for stranger in self.strangers:
            yield stranger.socket

    def admit(self, ready: set[object]) -> list[tuple[Channel, str]]:
        """Read from strangers, and accept new ones; returns the connections that have proven the key, with their
        addresses."""
        admitted, now = [], time.monotonic()
        for stranger in list(self.strangers):
            try:
                channel = stranger.read() if stranger.socket in ready else None
                if channel is None and now > stranger.deadline:
                    raise Ended("it proved nothing in time")
            except Ended as error:
                is_probe = not stranger.has_spoken and now <= stranger.deadline
                self._reject(stranger, "" if is_probe else str(error), has_wrong_key=isinstance(error, WrongKey))
                continue
            if channel is not None:
                self.strangers.remove(stranger)
                admitted.append((channel, stranger.address))
        if self.listening in ready:
            self._accept()
        return admitted

    def close(self) -> None:
        """Listen no more."""
        for source in self.sources():
            source.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            for _ in range(MOST_ACCEPTED):
                connection, address = self.listening.accept()
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stranger = Stranger(connection, str(address[0]), self.key)
                self.strangers.append(stranger)
                try:
                    stranger.greet()
                except Ended as error:
                    self._reject(stranger, str(error))
                if len(self.strangers) > MOST_STRANGERS:
                    self._reject(self._most_crowded(), "too many connections prove nothing")

    def _most_crowded(self) -> Stranger:
        """The oldest stranger of the address that has most of them; other addresses do not suffer from a flood."""
        ((address, _),) = Counter(stranger.address for stranger in self.strangers).most_common(1)
        return next(stranger for stranger in self.strangers if stranger.address == address)

    def _reject(self, stranger: Stranger, why: str, *, has_wrong_key: bool = False) -> None:
        """Close a connection, and print why; empty: it has sent nothing and ended."""
        self.strangers.remove(stranger)
        with contextlib.suppress(OSError):
            stranger.socket.close()
        address = stranger.address
        if has_wrong_key:
            self.rejected.add(address)
        self._num_rejected[address, why] += 1
        if why and self._num_rejected[address, why] <= MOST_LOGGED:
            last = "; further ones are not printed" if self._num_rejected[address, why] == MOST_LOGGED else ""
            self.say(f"rejected a connection from {address}: {why}{last}")
