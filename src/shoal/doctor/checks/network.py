"""Checks of this host's network: its name, its interfaces, the loopback, ports."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from shoal.comm.rendezvous.network_interface import address_of, interface_towards
from shoal.doctor.bounded import Check
from shoal.doctor.finding import Finding, counted, hint, ok, warning, will_fail

FEW_PORTS = 1000
"""Free ports below which ranks of several jobs may find none: each pair of ranks takes one or more."""
ELSEWHERE = "192.0.2.1"
"""An address of no host (RFC 5737), to ask for the default route. Nothing is sent to it."""


def checks(ports: Iterable[int]) -> Iterator[Check]:
    """The checks of the network of this host; `ports` have to be free."""
    yield Check("host name", host_name, 2.0, _slow_name)
    yield Check("interfaces", interfaces)
    yield Check("loopback", loopback)
    yield Check("ephemeral ports", ephemeral_ports)
    for port in ports:
        yield Check("port", lambda port=port: port_free(port))  # type: ignore[misc]


def host_name() -> Iterator[Finding]:
    """The name of this host must lead to an address that others reach: gloo listens there."""
    name = socket.gethostname()
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None, socket.AF_INET)})
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        evidence = f"{name} does not resolve ({why}); gloo would use the loopback"
        yield warning("host name", evidence, f"{_own_interface()}   # shoal does so itself; other scripts need it")
        return
    local = [address for address in found if ipaddress.ip_address(address).is_loopback]
    if local:
        evidence = f"{name} resolves to {local[0]}, the loopback; other hosts cannot reach gloo there"
        kind = warning if _is_one_of_several() else hint  # the usual state of a laptop
        yield kind("host name", evidence, f"{_own_interface()}   # shoal does so itself; other scripts need it")
    else:
        yield ok("host name", f"{name} is {', '.join(found[:3])}")


def _is_one_of_several() -> bool:
    """Whether a launcher has started this process as one of several hosts."""
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    master = os.environ.get("MASTER_ADDR", "localhost")
    return nodes not in ("", "1") or not (master == "localhost" or master.startswith("127."))


def _slow_name(seconds: float) -> Finding:
    name = socket.gethostname()
    evidence = f"{name} does not resolve within {seconds:g} s: a name server does not answer"
    return warning("host name", evidence, f"echo '{_own_address() or '10.0.0.1'} {name}' | sudo tee -a /etc/hosts")


def _own_interface() -> str:
    return f"export GLOO_SOCKET_IFNAME={default_interface() or 'eth0'}"


def _own_address() -> str | None:
    name = default_interface()
    return address_of(name) if name else None


def default_interface() -> str | None:
    """The interface of the default route; else the first one with an address other than the loopback."""
    return interface_towards(ELSEWHERE) or next(iter(addresses()), None)


def addresses() -> dict[str, str]:
    """Interface → IPv4 address, without the loopback."""
    found = {name: address_of(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address and not address.startswith("127.")}


def interfaces() -> Iterator[Finding]:
    """gloo takes one concrete name, NCCL takes prefixes; each must exist."""
    here = addresses()
    everything = [name for _, name in socket.if_nameindex()]
    usual = default_interface() or "eth0"
    gloo = os.environ.get("GLOO_SOCKET_IFNAME", "")
    unknown = [word for word in gloo.split(",") if word and word not in everything]
    if unknown:
        evidence = f"GLOO_SOCKET_IFNAME={gloo}, but {unknown[0]} is no interface; there are {', '.join(everything)}"
        yield will_fail("interfaces", evidence, f"export GLOO_SOCKET_IFNAME={usual}   # one name, without ^")
    nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if nccl and not _matches(nccl, everything):
        evidence = f"NCCL_SOCKET_IFNAME={nccl} matches none of {', '.join(everything)}"
        yield will_fail("interfaces", evidence, f"export NCCL_SOCKET_IFNAME={usual}")
    if unknown:
        return
    listed = ", ".join(f"{name} {address}" for name, address in here.items())
    if len(here) > 1 and not gloo:
        yield hint("interfaces", f"{listed}; the default route is {usual}", f"export GLOO_SOCKET_IFNAME={usual}")
    else:
        yield ok("interfaces", listed or "the loopback alone")


def _matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether NCCL finds an interface: a list of prefixes; `=` exact names; `^` all others."""
    is_excluded, is_exact = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    words = [word for word in pattern.lstrip("^=").split(",") if word]
    named = [name for name in names if any(name == word if is_exact else name.startswith(word) for word in words)]
    return len(named) < len(list(names)) if is_excluded else bool(named)


def loopback() -> Iterator[Finding]:
    """Ranks of one host connect over the loopback, at free ports."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=1.0).close()
            server.accept()[0].close()
    except OSError as error:
        evidence = f"127.0.0.1 cannot connect to itself: {error.strerror or error}"
        yield will_fail("loopback", evidence, "sudo ip link set lo up   # and let a firewall pass lo")
    else:
        yield ok("loopback", "127.0.0.1 connects to itself at a free port")


def ephemeral_ports() -> Iterator[Finding]:
    """gloo and NCCL listen at free ports, so a firewall between hosts has to open this range."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return
    number = high - low + 1
    if number < FEW_PORTS:
        fix = "sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'"
        yield warning("ephemeral ports", f"{counted(number, 'port')} ({low} to {high}), under {FEW_PORTS:,}", fix)
    else:
        yield ok("ephemeral ports", f"{low} to {high}; a firewall between hosts has to let them pass")


def port_free(port: int) -> Iterator[Finding]:
    """A given port must not be in use."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            probe.listen(1)
    except OSError as error:
        if isinstance(error, PermissionError):
            yield will_fail("port", f"{port} needs root: {error.strerror}", "export MASTER_PORT=29500")
            return
        holder = _holder(port) or "a process that this user may not see"
        fix = f"export MASTER_PORT={_free_port()}   # or end that process"
        yield will_fail("port", f"{port} is taken by {holder}", fix)
    else:
        yield ok("port", f"{port} is free")


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _holder(port: int) -> str:
    """The process that listens at a port, as far as this user may see it."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if int(words[1].rpartition(":")[2], 16) == port and words[3] == "0A":  # it listens
                    inodes.add(f"socket:[{words[9]}]")
    holders = [folder for folder in Path("/proc").glob("[0-9]*") if not inodes.isdisjoint(links_of(folder))]
    with contextlib.suppress(OSError, ValueError):  # one that has ended meanwhile
        oldest = min(holders, key=_start)  # its forks, such as this check, have the socket too
        command = (oldest / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return f"process {oldest.name} ({command[:60]})"
    return ""


def _start(process: Path) -> int:
    """When a process (/proc/PID) was started, in ticks since the machine was."""
    return int((process / "stat").read_text().rpartition(")")[2].split()[19])


def links_of(process: Path) -> Iterator[str]:
    """The files and sockets that a process (/proc/PID) has open; none, if this user may not see them."""
    with contextlib.suppress(OSError), os.scandir(process / "fd") as entries:
        for each in entries:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                yield os.readlink(each.path)
