"""All checks of this host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from shoal.doctor.bounded import Check, run_checks
from shoal.doctor.checks import cores, environment, files, gpu, memory, network, versions
from shoal.doctor.finding import Finding


def check_host(ports: Iterable[int] = ()) -> list[Finding]:
    """The findings of this host; `ports` have to be free."""
    return run_checks(list(host_checks([*ports, *port_of_environment()])))


def host_checks(ports: Iterable[int]) -> Iterator[Check]:
    """The checks in the order of the report."""
    yield from network.checks(dict.fromkeys(ports))
    yield from memory.checks()
    yield from files.checks()
    yield Check("home directory", files.home)
    yield from environment.checks()
    yield from cores.checks()
    yield from gpu.checks()
    yield from versions.checks()


def port_of_environment() -> Iterator[int]:
    """MASTER_PORT, unless this process is a rank: then rank 0 has opened the port."""
    port = os.environ.get("MASTER_PORT", "")
    if port.isdecimal() and 0 < int(port) < 65536 and "RANK" not in os.environ:
        yield int(port)
