"""torch's interface of a store, over an authenticated connection to the store of the coordinator.

torch calls it while groups are made, from Python and from C++. The values are encrypted on top (`SealedStore`): some of
them, such as NCCL's, are secrets, and messages are signed only.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shoal.comm.rendezvous.authenticated_store import SealedStore
from shoal.comm.rendezvous.mac import mac
from shoal.launch.hosts.messages import Channel, Ended, Message, WrongKey, prove

SECONDS_TO_CONNECT = 60.0
SLACK = 10.0
"""Seconds that a rank waits longer for an answer than the store waits for a key."""
_OPEN: list[dist.Store] = []
"""Stores in use. torch keeps the C++ part of a store alive, but not the Python object that it calls."""


def open_store(address: tuple[str, int], key: bytes, name: str, timeout: float) -> dist.Store:
    """The store at an address. `name`: begins all keys, another one in each generation."""
    inner = RankStore(address, key, name, timeout)
    store = SealedStore(inner, mac(key, "values", name))
    _OPEN.extend((inner, store))
    return store


class RankStore(dist.Store):
    """A connection to the store. Requests of several threads follow each other."""

    def __init__(self, address: tuple[str, int], key: bytes, name: str, timeout: float) -> None:
        super().__init__()
        self._name, self._seconds, self._lock = name, timeout, threading.Lock()
        self._address = f"{address[0]}:{address[1]}"
        self._channel = _connected(address, key, min(timeout, SECONDS_TO_CONNECT))

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask({"do": "set", "key": self._name + key, "value": data.hex()})

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        self.wait([key])
        found = self._ask({"do": "get", "key": self._name + key})
        if found is None:
            raise dist.DistStoreError(f"{key!r} was deleted")
        return bytes.fromhex(found)

    def add(self, key: str, value: int) -> int:
        """Add to a counter, and return its new value."""
        return int(self._ask({"do": "add", "key": self._name + key, "amount": value}))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value if another one is there; return the one that is there afterwards."""
        request = {"do": "swap", "key": self._name + key, "expected": expected.encode().hex()}
        return bytes.fromhex(self._ask({**request, "value": desired.encode().hex()}))

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._ask({"do": "check", "keys": [self._name + key for key in keys]}))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        request = {"do": "wait", "keys": [self._name + key for key in keys], "seconds": seconds}
        if not self._ask(request, seconds):
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, keys: {', '.join(keys[:8])}")

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        return bool(self._ask({"do": "delete", "key": self._name + key}))

    def num_keys(self) -> int:
        """Count the keys."""
        return int(self._ask({"do": "count", "key": self._name}))

    deleteKey = delete_key  # the names that torch calls from C++
    getNumKeys = num_keys
    compareSet = compare_set

    def _ask(self, request: Message, seconds: float = 0.0) -> Any:
        """Send a request, and return the answer."""
        with self._lock:
            deadline = time.monotonic() + seconds + self._seconds + SLACK
            try:
                self._channel.send(request)
                while True:
                    writes = [self._channel.socket] if self._channel.num_unsent else []
                    left = deadline - time.monotonic()
                    if left <= 0 or not any(select.select([self._channel.socket], writes, [], left)[:2]):
                        raise Ended("it does not answer")
                    self._channel.flush()
                    if answers := self._channel.read():
                        return answers[0]["is"]
            except BaseException as error:
                self._channel.close()  # else a late answer would be taken for that of the next request
                if isinstance(error, Ended | OSError | ValueError):
                    raise dist.DistNetworkError(f"the store at {self._address} is lost: {error}") from None
                raise


def _connected(address: tuple[str, int], key: bytes, seconds: float) -> Channel:
    """Connect and authenticate. A store that is flooded with connections is tried again."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection(address, timeout=max(1.0, deadline - time.monotonic()))
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return prove(connection, key)
            except BaseException:
                connection.close()
                raise
        except (OSError, Ended) as error:
            if time.monotonic() + 0.3 > deadline or isinstance(error, WrongKey):
                where = f"{address[0]}:{address[1]}"
                raise dist.DistNetworkError(f"the store at {where} cannot be reached: {error}") from None
            time.sleep(0.1)
