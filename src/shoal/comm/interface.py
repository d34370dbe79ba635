"""Through which network interface this host reaches another.

gloo listens on the address that the host's own name stands for. On many machines that is the loopback, and the ranks of
two hosts then wait for each other for ever. The route to rank 0 is a fact, so it is asked instead.
"""

from __future__ import annotations

import fcntl
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


def _address_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _GET_ADDRESS, request)
        except OSError:  # it has no IPv4 address
            return None
    return socket.inet_ntoa(answer[20:24])
