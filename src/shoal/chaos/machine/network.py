"""Hosts as network namespaces of this machine, with a switch between them. It needs root.

host 0  10.79.S.1 ─ eth0 ─┐
host 1  10.79.S.2 ─ eth0 ─┴─ a bridge in a namespace of its own; each link can be cut and slowed there
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from shoal.errors import ShoalError

SLOW = "tbf rate 10mbit burst 32kbit latency 400ms"
_ABSENT = "02:00:00:00:00:01"
"""The address of no interface."""


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts that reach each other."""

    names: list[str]
    """The namespaces of the hosts; empty: there is one host, this machine."""
    addresses: list[str]
    switch: str = ""

    def prefix(self) -> list[str]:
        """The words before a command that runs on the first host."""
        return ["ip", "netns", "exec", self.names[0]] if self.names else []

    def train_options(self, per_host: int) -> list[str]:
        """The options of `shoal train` for these hosts."""
        if not self.names:
            return ["--nproc", str(per_host)]
        hosts = ",".join(f"{name}:{per_host}" for name in self.names)
        return ["--hosts", hosts, "--ssh", "ip netns exec {host}", "--listen", self.addresses[0]]

    def cut(self, host: int) -> None:
        """Take the link of a host down."""
        _ip(f"-n {self.switch} link set port{host} down")

    def drop_outgoing(self, host: int) -> None:
        """Let all packets of a host vanish on their way; it still gets those of others. A queue that drops them would
        do so before they leave, and the kernel knows of that."""
        for address in self.addresses:
            _ip(f"-n {self.names[host]} neighbour replace {address} lladdr {_ABSENT} dev eth0 nud permanent")

    def slow(self, host: int) -> None:
        """Limit the link of a host, in both directions."""
        for space, device in ((self.switch, f"port{host}"), (self.names[host], "eth0")):
            _run(f"tc -n {space} qdisc replace dev {device} root {SLOW}")

    def heal(self, host: int) -> None:
        """Restore the link of a host."""
        _ip(f"-n {self.switch} link set port{host} up")
        _ip(f"-n {self.names[host]} neighbour flush dev eth0 nud permanent")
        for space, device in ((self.switch, f"port{host}"), (self.names[host], "eth0")):
            with suppress(ShoalError):  # it was not slow
                _run(f"tc -n {space} qdisc delete dev {device} root")


@contextmanager
def hosts(number: int, name: str) -> Iterator[Network]:
    """Make that many hosts, and remove them; one: this machine itself."""
    if number == 1:
        yield Network([], [])
        return
    subnet = sum(name.encode()) % 250
    network = Network(
        names=[f"{name}-{host}" for host in range(number)],
        addresses=[f"10.79.{subnet}.{host + 1}" for host in range(number)],
        switch=f"{name}-switch",
    )
    try:
        _build(network)
        yield network
    finally:
        for each in (*network.names, network.switch):
            subprocess.run(["ip", "netns", "delete", each], check=False, capture_output=True)


def _build(network: Network) -> None:
    switch = network.switch
    for each in (*network.names, switch):
        _ip(f"netns add {each}")
    _ip(f"-n {switch} link add bridge type bridge")
    _ip(f"-n {switch} link set bridge up")
    for host, (name, address) in enumerate(zip(network.names, network.addresses, strict=True)):
        _ip(f"link add eth0 netns {name} type veth peer name port{host} netns {switch}")
        _ip(f"-n {switch} link set port{host} master bridge")
        _ip(f"-n {switch} link set port{host} up")
        _ip(f"-n {name} address add {address}/24 dev eth0")
        _ip(f"-n {name} link set eth0 up")
        _ip(f"-n {name} link set lo up")


def _ip(words: str) -> None:
    _run(f"ip {words}")


def _run(words: str) -> None:
    try:
        subprocess.run(words.split(), check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip()
        what = f"hosts cannot be made of network namespaces: `{words}` failed: {why}"
        raise ShoalError(
            what, fix="--hosts 1; or as root, with the programs ip and tc (iproute2)", code="N082"
        ) from None
