"""Two hosts far apart: network namespaces whose link delays every packet and loses some of them. It needs root.

    host 0  10.74.0.1 ─ far0 ─┐
    host 1  10.74.0.2 ─ far0 ─┴─ a process between two TUN devices: each packet is dropped, or sent on after a delay

The kernel's own way (netem) is not in every kernel. The packets are those of TCP itself, so it has to send lost ones
again, and waits for acknowledgements as it would over a long cable.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

DEVICE = "far0"
SET_INTERFACE, IS_TUN, NO_HEADER = 0x400454CA, 0x0001, 0x1000


@dataclass(slots=True)
class FarLink:
    """The hosts, and what has become of their packets once the context has ended."""

    hosts: list[tuple[str, str]]
    """Name and address of each."""
    counts: dict[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def far_hosts(
    *, round_trip: float, loss: float = 0.0, seed: int = 0, largest: int = 65536, only_port: int = 0
) -> Iterator[FarLink]:
    """Make the hosts and remove them. `round_trip`: in seconds; `loss`: the part of packets that is lost; `largest`:
    bytes of the largest packet that arrives; `only_port`: the one that a firewall leaves open, or 0."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not os.path.exists("/dev/net/tun"):
        pytest.skip("needs root, the program ip (package iproute2) and /dev/net/tun")
    names = [f"shoal-far-{os.getpid()}-{number}" for number in range(2)]
    link = FarLink([(name, f"10.74.0.{number + 1}") for number, name in enumerate(names)])
    between: subprocess.Popen[str] | None = None
    try:
        for name in names:
            ip("netns", "add", name)
        words = [*names, *map(str, (round_trip / 2, loss, seed, largest, only_port))]
        between = subprocess.Popen(
            [sys.executable, __file__, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert between.stdout is not None
        assert between.stdout.readline() == "ready\n"
        for name, address in link.hosts:
            ip("-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", name, "link", "set", DEVICE, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield link
        between.terminate()
        link.counts.update(json.loads(between.communicate(timeout=10)[0]))
    finally:
        if between is not None:
            between.kill()
            between.wait()
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _device_in(network: str) -> int:
    """A TUN device in a network; this process returns to its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    before, other = os.open("/proc/self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{network}", os.O_RDONLY)
    assert libc.setns(other, 0) == 0, os.strerror(ctypes.get_errno())
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, SET_INTERFACE, struct.pack("16sH22x", DEVICE.encode(), IS_TUN | NO_HEADER))
    assert libc.setns(before, 0) == 0, os.strerror(ctypes.get_errno())
    os.close(before)
    os.close(other)
    return device


@dataclass(frozen=True, slots=True)
class _Filter:
    """Packets that never arrive, without a word to their sender."""

    largest: int
    only_port: int

    def drops(self, packet: bytes) -> bool:
        """Whether a packet of IP version 4 is too large, or TCP at a closed port."""
        start = 4 * (packet[0] & 15)
        is_tcp = packet[0] >> 4 == 4 and packet[9] == 6 and len(packet) >= start + 4
        ports = struct.unpack_from("!HH", packet, start) if is_tcp else ()
        return len(packet) > self.largest or bool(self.only_port and ports and self.only_port not in ports)


def _forward(one: int, two: int, delay: float, loss: float, seed: int, closed: _Filter) -> None:
    """Send packets on for ever."""
    chance, due, counts = random.Random(seed), list[tuple[float, int, int, bytes]](), {"sent": 0, "lost": 0}

    def end(number: int, frame: object) -> None:
        print(json.dumps(counts), flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    print("ready", flush=True)
    while True:
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        for device in select.select([one, two], [], [], wait)[0]:
            with contextlib.suppress(BlockingIOError, OSError):
                while True:
                    packet, to = os.read(device, 65536), two if device == one else one
                    is_lost = closed.drops(packet) or chance.random() < loss
                    counts["lost" if is_lost else "sent"] += 1
                    if not is_lost:
                        heapq.heappush(due, (time.monotonic() + delay, counts["sent"], to, packet))
        while due and due[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(due)
            with contextlib.suppress(OSError):  # a device that is down, or full
                os.write(to, packet)


if __name__ == "__main__":
    closed = _Filter(int(sys.argv[6]), int(sys.argv[7]))
    devices = _device_in(sys.argv[1]), _device_in(sys.argv[2])
    _forward(*devices, float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), closed)
