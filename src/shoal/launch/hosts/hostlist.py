"""Read `--hosts a:8,b:8`, or a file with one host a line (`a slots=8`), and choose the address to listen at."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import Problem, ShoalError, raise_if
from shoal.safe_parsing import read_text

LOOPBACK = "127.0.0.1"
MOST_SLOTS = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9][A-Za-z0-9._-]*)?")
_LINE = re.compile(r"(?P<name>\S+)(\s+slots\s*=\s*(?P<slots>\S+))?(\s+max_slots\s*=\s*\S+)?")


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A host of a run, and the number of ranks on it."""

    name: str
    slots: int

    @property
    def bare_name(self) -> str:
        """The name without the user of `user@host`."""
        return self.name.rpartition("@")[2]

    @property
    def is_local(self) -> bool:
        """Whether this process runs on that host, so that no ssh is needed."""
        return _is_this_host(self.bare_name)

    def is_called(self, name: str) -> bool:
        """Whether an agent that gives this name may be of this host; a domain may be missing on either side."""
        if name in (self.name, self.bare_name):
            return True
        if _is_address(name) or _is_address(self.bare_name):
            return False
        return name.startswith(f"{self.bare_name}.") or self.bare_name.startswith(f"{name}.")


def called(name: str, hosts: Sequence[HostSpec]) -> HostSpec | None:
    """The host of an agent that gives this name: one with exactly this name, or the only one without a domain."""
    exact = [host for host in hosts if name in (host.name, host.bare_name)]
    found = exact or [host for host in hosts if host.is_called(name)]
    return found[0] if len(found) == 1 else None


def read_hosts(text: str, *, default_slots: int | None) -> list[HostSpec]:
    """The hosts of `--hosts`; raises all problems at once."""
    path = Path(text)
    may_be_file = bool(text) and "," not in text and ":" not in text
    is_file = "," not in text and ("/" in text or (may_be_file and path.is_file()))
    if not path.is_file() and (is_file or (may_be_file and default_slots is None and _NAME.fullmatch(text))):
        raise _no_such_file(text)
    entries = list(_of_file(read_text(path, "--hosts a:8,b:8")) if is_file else _of_words(text))
    problems = list(_check(entries, default_slots))
    raise_if(problems, title="--hosts" if len(problems) > 1 else "")
    return [HostSpec(name, int(slots) if slots else default_slots or 0) for name, slots in entries]


def _no_such_file(text: str) -> ShoalError:
    is_name = _NAME.fullmatch(text) is not None  # a host without its ranks, or the name of a file in this directory
    also = " and, as a host, it must have its number of ranks" if is_name else ""
    fix = f"--hosts FILE with lines such as `a slots=8`; or --hosts {f'{text}:8' if is_name else 'a:8,b:8'}"
    return ShoalError(f"--hosts {text[:80]!r} is no file in {str(Path.cwd())!r}{also}", fix=fix, code="N073")


def _of_words(text: str) -> Iterator[tuple[str, str]]:
    for word in text.split(","):
        name, _, slots = word.strip().partition(":")
        yield name, slots


def _of_file(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if not line:
            continue
        found = _LINE.fullmatch(line)
        if found:
            yield found["name"], found["slots"] or ""
        else:
            yield from _of_words(line)


def _check(entries: Sequence[tuple[str, str]], default_slots: int | None) -> Iterator[Problem]:
    usual = "--hosts a:8,b:8"
    if not entries:
        yield Problem("N050", "--hosts must name at least one host, got none", usual)
    seen: set[str] = set()
    for name, slots in entries:
        if not _NAME.fullmatch(name):
            yield Problem("N050", f"--hosts must have names or IPv4 addresses of hosts, got {name[:80]!r}", usual)
        elif not slots and default_slots is None:
            yield Problem("N050", f"host {name} must have a number of ranks", f"--hosts {name}:8, or --nproc 8")
        elif slots and not (slots.isdecimal() and 0 < int(slots) <= MOST_SLOTS):
            what = f"the ranks of host {name} must be 1 to {MOST_SLOTS}, got {slots[:80]!r}"
            yield Problem("N050", what, f"--hosts {name}:8")
        if name in seen:
            yield Problem("N050", f"host {name} stands twice in --hosts", f"--hosts {name}:N once, with all its ranks")
        seen.add(name)


def choose_address(
    hosts: Sequence[HostSpec], wanted: str | None, route_to: Callable[[HostSpec], str | None] = lambda host: None
) -> tuple[str, int]:
    """The address of this host at which agents connect, and the port; port 0: any free one. `route_to`: the address of
    a host whose name is an alias."""
    if wanted:
        address, port = _wanted(wanted)
    elif all(host.is_local for host in hosts):
        return LOOPBACK, 0
    else:
        others = [host for host in hosts if not host.is_local]
        names = [host.bare_name if _resolved(host.bare_name) else route_to(host) for host in others]
        address, port = _towards([name for name in names if name]), 0
    if _is_address(address) and ipaddress.ip_address(address).is_unspecified:
        raise ShoalError(
            f"--listen {wanted} is every interface of this host, and no address at which agents could join",
            fix="--listen ADDRESS, an address of this host in the network of the others (`ip -brief address`)",
            code="N051",
        )
    if _is_loopback(address) and not all(host.is_local for host in hosts):
        raise ShoalError(
            f"other hosts would connect to {address}, but that is the loopback, which only this host reaches",
            fix="--listen ADDRESS, an address of this host in the network of the others (`ip -brief address`)",
            code="N051",
        )
    return address, port


def check_names(hosts: Sequence[HostSpec], is_reached: Callable[[HostSpec], bool]) -> Iterator[Problem]:
    """Find names that resolve to the loopback here (/etc/hosts often has such lines), and names without an address.

    `is_reached`: whether the command that starts agents finds a host whose name has no address here.
    """
    for host in hosts:
        name, addresses = host.bare_name, _resolved(host.bare_name)
        found = [address for address in addresses if _is_loopback(address)]
        is_meant = name == "localhost" or _is_address(name) or name in _own_names()
        if found and not is_meant:
            what = f"host {name} resolves to {found[0]}, the loopback of this host"
            yield Problem("N051", what, f"--hosts with the address of {name}, or correct /etc/hosts")
        if not addresses and not is_meant and not is_reached(host):
            what = f"host {name} cannot be resolved to an address"
            yield Problem("N074", what, f"correct the name, or --hosts with the address of {name}")


def _wanted(text: str) -> tuple[str, int]:
    name, _, port = text.partition(":")
    found = _resolved(name)
    if not found or (port and not (port.isdecimal() and int(port) < 65535)):
        what = f"--listen must be an address of this host and a port, got {text[:80]!r}"
        raise ShoalError(what, fix="--listen 10.0.0.1:29400", code="N050")
    return found[0], int(port or 0)


def _towards(names: Sequence[str]) -> str:
    """The address of this host on the route to one of these hosts; else the one that its own name has."""
    for name in names:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # sends nothing; it only looks up the route
            return str(probe.getsockname()[0])
    return next(iter(_resolved(socket.gethostname())), LOOPBACK)


def _is_this_host(name: str) -> bool:
    if name == "localhost" or name in _own_names():
        return True
    for address in _resolved(name):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))  # works only for an address of this host
            return True
    return False


def _own_names() -> set[str]:
    own = socket.gethostname()
    return {own, own.partition(".")[0]}


def _resolved(name: str) -> list[str]:
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, socket.AF_INET)})
    except (OSError, UnicodeError):
        return []


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return _is_address(address) and ipaddress.ip_address(address).is_loopback
