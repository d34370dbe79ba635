"""torch's TCPStore in a child of the coordinator, on one interface. Workers find each other through it.

The store has threads, and a process with threads cannot fork safely. It also needs torch, which takes seconds to load;
the child loads it while the agents do. The socket listens before that, so no worker fails to connect.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from shoal.launch.hosts.lifetime import forked
from shoal.launch.hosts.messages import Message


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
        pid = forked(partial(_serve, listening, theirs, address, key))
        listening.close()
        theirs.close()
        return cls(address, pid, orders)

    def publish(self, members: Message) -> None:
        """Write members, generation and plan to the store, sealed with the key of the run."""
        with contextlib.suppress(OSError):
            self.orders.send(json.dumps(members).encode())

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


def _serve(listening: socket.socket, orders: socket.socket, address: tuple[str, int], key: bytes) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    close_all_but(listening.fileno(), orders.fileno())
    import torch.distributed as dist

    from shoal.comm.rendezvous.authenticated_store import SealedStore

    store = dist.TCPStore(
        *(*address, None, True, timedelta(seconds=60)), wait_for_workers=False, master_listen_fd=listening.detach()
    )
    sealed = SealedStore(store, key)
    while data := orders.recv(2**20):
        sealed.set("members", data)
    return 0
