"""The network interface through which this host reaches another, and the one on which it listens.

gloo listens on the address that the host's own name resolves to. On many machines that is the loopback, and the ranks
of two hosts then wait for each other for ever. The route to rank 0 is a fact, so the system is queried for it.
"""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import socket
import struct

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_LIST_ADDRESSES = 0x8912  # SIOCGIFCONF
_ENTRY = struct.Struct("@16sHH4s16x")  # struct ifreq: the name of an interface, family, port, address


def interface_towards(host: str) -> str | None:
    """Return the interface that packets to `host` leave by; None if it is unknown or the loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # connecting a datagram socket sends nothing; it only looks up the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if not own.startswith("127.") and address_of(name) == own), None)


def loopback() -> str | None:
    """Return the loopback interface, which only this host reaches; None if there is none of the usual name."""
    return "lo" if "lo" in (name for _, name in socket.if_nameindex()) else None


def listening_socket(host: str, port: int, *, is_one_host: bool) -> socket.socket:
    """Open a socket that listens on the address of `host` alone, and so on one interface.

    It listens on all interfaces if that address is not one of this host, or if other hosts cannot reach it: on many
    machines a host's own name resolves to the loopback. Raises OSError if the port is taken.
    """
    for family, address in _addresses(host):
        if is_one_host or not _is_loopback(address):
            try:
                return _bound(family, address, port)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
    return _bound(socket.AF_INET6, "::", port) if socket.has_dualstack_ipv6() else _bound(socket.AF_INET, "", port)


def _bound(family: int, address: str, port: int) -> socket.socket:
    return socket.create_server(
        (address, port), family=family, backlog=4096, dualstack_ipv6=family == socket.AF_INET6 and address == "::"
    )


def _addresses(host: str) -> list[tuple[int, str]]:
    """Resolve a name to families and addresses, IPv4 first; empty if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({(int(family), str(where[0])) for family, _, _, _, where in found})


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if there is no such interface, or it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, request)
        except OSError:  # it has no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])


def own_addresses() -> list[str]:
    """Return all IPv4 addresses of this host, of every interface; empty if the system does not list them."""
    room = array.array("B", bytes(64 * _ENTRY.size))
    while True:
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _LIST_ADDRESSES, request)
            except OSError:
                return []
        (length,) = struct.unpack("i", answer[:4])
        if length < len(room):  # else there may be more
            entries = [_ENTRY.unpack_from(room, at) for at in range(0, length, _ENTRY.size)]
            return sorted({socket.inet_ntoa(address) for _, _, _, address in entries})
        room = array.array("B", bytes(2 * len(room)))
