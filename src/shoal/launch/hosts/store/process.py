"""The child of the coordinator that serves the store, so that ranks wait for no other work of the coordinator."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass
from functools import partial

from shoal.launch.hosts.lifetime import forked
from shoal.launch.hosts.listener import Listener
from shoal.launch.hosts.store.server import StoreServer, prefix_of, store_key


@dataclass(slots=True)
class StoreProcess:
    """The child with the store."""

    address: tuple[str, int]
    pid: int
    orders: socket.socket

    @classmethod
    def start(cls, host: str, port: int, key: bytes) -> StoreProcess:
        """Listen, and fork the child that serves the store."""
        listening = socket.create_server((host, port), backlog=4096)
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = (host, int(listening.getsockname()[1]))
        theirs.setblocking(False)
        pid = forked(partial(_serve, listening, theirs, store_key(key)))
        listening.close()
        theirs.close()
        return cls(address, pid, orders)

    def begin(self, job: str, generation: int) -> None:
        """Begin a generation with an empty store. It has to be called before its ranks are started."""
        with contextlib.suppress(OSError):
            self.orders.send(prefix_of(job, generation).encode())

    def close(self) -> None:
        """End the child."""
        self.orders.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def close_all_but(*kept: int) -> None:
    """Close what a fork has copied, so that connections end with the process that made them."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _serve(listening: socket.socket, orders: socket.socket, key: bytes) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    close_all_but(listening.fileno(), orders.fileno())
    server = StoreServer(Listener(listening, key, _say))
    while True:
        ready = server.wait(orders)
        with contextlib.suppress(BlockingIOError):  # before the ranks are answered: they may be of a new generation
            prefix = orders.recv(2**12).decode()
            if not prefix:
                return 0
            server.begin(prefix)
        server.answer(ready)


def _say(text: str) -> None:
    print(f"shoal: store: {text}", file=sys.stderr, flush=True)
