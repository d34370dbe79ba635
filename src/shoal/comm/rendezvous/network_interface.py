"""Through which network interface this host reaches another, and on which one it listens.

gloo listens on the address that the host's own name stands for. On many machines that is the loopback, and the ranks of
two hosts then wait for each other for ever. The route to rank 0 is a fact, so it is asked instead.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def interface_towards(host: str) -> str | None:
    """The name of the interface that packets to `host` leave by; None where that cannot be told, or is the loopback."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # a datagram socket sends nothing when it connects; it only looks up the route
            own = probe.getsockname()[0]
    except OSError:
        return None
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if not own.startswith("127.") and _address_of(name) == own), None)


def loopback() -> str | None:
    """The name of the interface that only this host reaches; None if it has none that is called so."""
    return "lo" if "lo" in (name for _, name in socket.if_nameindex()) else None


def listening_socket(host: str, port: int, *, is_one_host: bool) -> socket.socket:
    """A socket that listens at the address of `host` alone, and so on one interface.

    It listens on all interfaces only where that address is not one of this host, or one that other hosts cannot reach:
    a host's own name stands for the loopback on many machines. Raises OSError if the port is taken.
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
    """Families and addresses that a name stands for, IPv4 first; none if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({(int(family), str(where[0])) for family, _, _, _, where in found})


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _address_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, request)
        except OSError:  # it has no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])
