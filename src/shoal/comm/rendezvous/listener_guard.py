"""Close the ports of gloo to other hosts than those of the run.

gloo opens a port for each group. The first process that connects and sends the small number of a peer takes its place;
the proof of the group (`session`) finds this, and the run has to restart. So the port is closed to strangers before its
number is published:

    gloo    listen ────────────── store.set(port) ─ connections of peers ─ group
    here             filter the port ──┘                            again ──┘

`filter`: packets from other addresses than those of the run's hosts are dropped (`source_filter`). Other processes of
these hosts are not rejected. A connection from the moment before the filter is ended: if it has not sent a number yet,
gloo forgets it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from shoal.comm.rendezvous.network_interface import own_addresses
from shoal.comm.rendezvous.own_sockets import Socket, open_sockets
from shoal.comm.rendezvous.source_filter import accept_only

LOOPBACK = "127.0.0.0/8"
"""Only processes of the same host have these addresses: also a proxy that passes connections on."""


@dataclass(frozen=True, slots=True)
class Peers:
    """From where ranks connect to those of this host."""

    addresses: tuple[str, ...]
    """All addresses of all hosts."""
    own: str | None = None
    """The address at which the other hosts have reached this one; None: there is no other host."""


@dataclass(slots=True)
class _Guard:
    """The groups that are being created."""

    peers: Peers | None = None
    """None: unknown. Every address may connect."""
    reports: bool = True
    """Whether this process prints once that it cannot filter."""
    before: set[Socket] | None = None
    """The sockets from before the groups; None: no group is being created."""
    seen: set[Socket] = field(default_factory=set)
    """Listening sockets that have a filter, or cannot have one."""
    filtered: set[tuple[str, int]] = field(default_factory=set)
    """Addresses and ports with a filter."""


_guard = _Guard()


def ranks_here() -> Peers | None:
    """From where ranks connect that are all on this host; None: its addresses cannot be read."""
    addresses = own_addresses()
    return Peers(tuple(addresses)) if addresses else None


def expect_peers(peers: Peers | None, *, reports: bool) -> None:
    """Set from where ranks connect, for groups from now on. None: every address may connect."""
    _guard.peers, _guard.reports = peers, reports


@contextmanager
def guarding(before: set[Socket]) -> Iterator[None]:
    """Filter the ports that groups open during the context. `before`: the sockets at its beginning."""
    _guard.before, _guard.seen, _guard.filtered = before, set(), set()
    try:
        yield
    finally:
        guard_listeners()
        _guard.before = None


def guard_listeners() -> None:
    """Filter new ports, and end connections of strangers that were made before. A store calls it before a value is
    published: that may be the number of a port."""
    if _guard.peers is None or _guard.before is None:
        return
    with ExitStack() as stack:
        new: dict[Socket, socket.socket] = {}
        for name in open_sockets() - _guard.before:
            with suppress(OSError):  # closed meanwhile
                new[name] = stack.enter_context(socket.socket(fileno=os.dup(name[0])))
        networks = [*_guard.peers.addresses, LOOPBACK]
        for name, each in new.items():
            if name not in _guard.seen and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _guard.seen.add(name)
                _filter(each, _guard.peers, networks)
        for each in new.values():
            with suppress(OSError):  # not connected
                if each.getsockname() in _guard.filtered and not _is_in(each.getpeername()[0], networks):
                    each.shutdown(socket.SHUT_RDWR)


def _filter(listening: socket.socket, peers: Peers, networks: list[str]) -> None:
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return
    address = str(listening.getsockname()[0])
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return  # no other host reaches it
    why = ""
    if listening.family != socket.AF_INET:
        why = "only those of IPv4 are filtered"
    elif peers.own not in (None, address):
        why = f"the hosts of the run have reached this one at {peers.own}"
    else:
        try:
            accept_only(listening, networks)
            _guard.filtered.add(listening.getsockname())
        except OSError as error:
            why = f"the kernel does not filter it: {error}"
    if why and _guard.reports:
        _guard.reports = False
        print(f"shoal: every address may connect to ranks at {address}: {why}", file=sys.stderr, flush=True)


def _is_in(address: str, networks: list[str]) -> bool:
    return any(ipaddress.ip_address(address) in ipaddress.ip_network(network) for network in networks)
