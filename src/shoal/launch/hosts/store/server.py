"""The values of the store, for peers that have proven the key.

torch's TCPStore answers any process: it lists its keys, and lets anyone write them. A stranger at its port could keep
ranks from starting. Here a connection proves the key first (`Listener`); each request and answer is a message with a
MAC and a number (`Channel`). A request that waits for a key is answered when the key is there.
A generation that begins drops the keys of the one before. A rank of an earlier one is disconnected.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from dataclasses import dataclass, field

from shoal.comm.rendezvous.mac import mac
from shoal.launch.hosts.listener import Listener
from shoal.launch.hosts.messages import Channel, Ended, Message

TURN = 0.5
MOST_BYTES = 2**28
"""Bytes of all values."""


def store_key(secret: bytes) -> bytes:
    """The key with which ranks prove themselves to the store; it follows from the key of the run."""
    return mac(secret, "store of ranks")


def prefix_of(job: str, generation: int) -> str:
    """The beginning of all keys of a generation."""
    return f"{job} {generation}/"


@dataclass(slots=True)
class StoreServer:
    """The values, and the ranks that are connected."""

    listener: Listener
    values: dict[str, bytes] = field(default_factory=dict)
    prefix: str = ""
    """The beginning of all keys of this generation."""
    _ranks: list[Channel] = field(default_factory=list)
    _waiting: dict[int, tuple[Channel, list[str], float]] = field(default_factory=dict)
    """Descriptor of a rank → the keys that it waits for, and until when."""

    def begin(self, prefix: str) -> None:
        """Begin a generation: drop all that earlier ones have written."""
        self.prefix = prefix
        self.values.clear()

    def wait(self, orders: socket.socket) -> set[object]:
        """Wait a moment for requests, or for `orders`; returns the sockets that are ready."""
        with selectors.DefaultSelector() as selector:
            for source in (orders, *self.listener.sources()):
                selector.register(source, selectors.EVENT_READ)
            for rank in self._ranks:
                write = selectors.EVENT_WRITE if rank.num_unsent else 0
                selector.register(rank.socket, selectors.EVENT_READ | write)
            return {key.fileobj for key, _ in selector.select(TURN)}

    def answer(self, ready: set[object]) -> None:
        """Answer the requests that have come."""
        for rank in [each for each in self._ranks if each.socket in ready]:
            try:
                rank.flush()
                for request in rank.read():
                    self._answer(rank, request)
            except (Ended, KeyError, TypeError, ValueError, AttributeError):
                self._forget(rank)
        self._answer_waiting()
        self._ranks += [channel for channel, _ in self.listener.admit(ready)]

    def _forget(self, rank: Channel) -> None:
        self._ranks.remove(rank)
        self._waiting.pop(rank.socket.fileno(), None)
        rank.close()

    def _answer(self, rank: Channel, request: Message) -> None:
        keys = map(str, request["keys"] if "keys" in request else [request["key"]])
        if not all(key.startswith(self.prefix) for key in keys):
            raise ValueError("a rank of an earlier generation")
        if request["do"] == "wait":
            until = time.monotonic() + float(request["seconds"])
            self._waiting[rank.socket.fileno()] = rank, list(map(str, request["keys"])), until
        else:
            rank.send({"is": self._done(request)})

    def _done(self, request: Message) -> str | int | bool | None:
        """Do what a request says, and return its result. Values are hexadecimal."""
        kind, key = request["do"], str(request.get("key"))
        if kind == "set":
            self._set(key, bytes.fromhex(request["value"]))
            return None
        if kind == "get":
            return self.values[key].hex() if key in self.values else None
        if kind == "add":
            total = int(self.values.get(key, b"0")) + int(request["amount"])
            self._set(key, str(total).encode())
            return total
        if kind == "swap":  # sets a value if it is the expected one, or absent; returns the value that is there
            expected = bytes.fromhex(request["expected"])
            if self.values.get(key, b"" if not expected else None) == expected:
                self._set(key, bytes.fromhex(request["value"]))
            return self.values.get(key, expected).hex()
        if kind == "check":
            return all(str(each) in self.values for each in request["keys"])
        if kind == "delete":
            return self.values.pop(key, None) is not None
        if kind == "count":
            return sum(each.startswith(key) for each in self.values)
        raise KeyError(kind)

    def _set(self, key: str, value: bytes) -> None:
        self.values[key] = value
        if sum(map(len, self.values.values())) > MOST_BYTES:
            raise ValueError("the store is full")

    def _answer_waiting(self) -> None:
        now = time.monotonic()
        for number, (rank, keys, until) in list(self._waiting.items()):
            is_there = all(key in self.values for key in keys)
            if is_there or now > until:
                del self._waiting[number]
                with contextlib.suppress(Ended):
                    rank.send({"is": is_there})
