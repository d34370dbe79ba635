"""Let only some addresses connect to a socket that listens.

gloo accepts a connection of any process. The kernel can reject some of them before gloo sees them: a classic BPF
program at a listening socket is run for every packet, also for the first one of a connection. A packet is dropped if
the program returns 0, so a process at another address gets no answer. No right is needed for it.

    for each network   load the source address, AND the mask; keep the packet if this is the network
    at the end         drop the packet

Accepted sockets inherit the program. Their packets pass, since their peer has passed.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv4Network

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of Linux, as all numbers below
_LOAD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06  # of 32 bits, at a fixed offset or with a constant
_SOURCE_ADDRESS = 0xFFF00000 + 12  # SKF_NET_OFF, the beginning of the IPv4 header, and the offset in it
_WHOLE_PACKET = 0xFFFFFFFF


def accept_only(listening: socket.socket, networks: Iterable[str]) -> None:
    """Drop packets from outside some IPv4 networks (`10.0.0.1`, `127.0.0.0/8`). OSError if the kernel cannot."""
    instructions = program(networks)
    number = len(instructions) // 8
    memory = ctypes.create_string_buffer(instructions, len(instructions))
    listening.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", number, ctypes.addressof(memory)))


def program(networks: Iterable[str]) -> bytes:
    """The instructions: operation, distance to jump if true and if false, constant."""
    lines: list[tuple[int, int, int, int]] = []
    for network in map(IPv4Network, networks):
        lines += [
            (_LOAD, 0, 0, _SOURCE_ADDRESS),
            (_AND, 0, 0, int(network.netmask)),
            (_IF_EQUAL, 0, 1, int(network.network_address)),
            (_RETURN, 0, 0, _WHOLE_PACKET),
        ]
    return b"".join(struct.pack("HBBI", *line) for line in [*lines, (_RETURN, 0, 0, 0)])
