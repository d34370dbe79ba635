"""The kinds of faults: how each is made, what it needs, and how the run has to report it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Target = Literal["rank", "host", "run"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault."""

    about: str
    """How it is made."""
    target: Target
    report: str = ""
    """A pattern of the line that names it, with {rank}, {ranks} and {host}; empty: no line has to name it."""
    limit: float = 5.0
    """Seconds in which it should be named."""
    seconds: tuple[float, float] = (0.0, 0.0)
    """How long it lasts, at least and at most; 0: until the run has ended the rank."""
    needs_root: bool = False
    needs_hosts: bool = False
    ends_ranks: bool = True
    """Whether ranks have to be started again after it."""


_KILLED = r"rank {rank} of {ranks}\b.* was killed by signal 9"

KINDS = {
    "kill": Kind("SIGKILL to a rank", "rank", _KILLED, limit=1.0),
    "stop": Kind("SIGSTOP to a rank", "rank", r"rank {rank} of {ranks}\b.* was stopped by a signal"),
    "gil": Kind("a rank holds the GIL", "rank", r"rank {rank} of {ranks}\b.* holds the GIL"),
    "corrupt": Kind(
        "a byte of the newest checkpoint is flipped, and a rank is killed",
        "rank",
        rf"{_KILLED}|cannot be used, trying the next one",
        limit=1.0,
    ),
    "clock": Kind(
        "the wall clock of a rank jumps by up to a day", "rank", seconds=(-86400.0, 86400.0), ends_ranks=False
    ),
    "supervisor": Kind("SIGKILL to the command, which is then given again", "run"),
    "oom": Kind(
        "a rank takes memory until the kernel ends it (a limit of the control group)",
        "rank",
        rf"{_KILLED}.*lack of memory",
        limit=10.0,
        needs_root=True,
    ),
    "disk": Kind(
        "the disk of the checkpoints is full (a tmpfs)",
        "run",
        "NOT SAVED, training continues",
        limit=10.0,
        seconds=(3.0, 6.0),
        needs_root=True,
        ends_ranks=False,
    ),
    "partition": Kind(
        "the link of a host is down",
        "host",
        r"host {host} .*is lost",
        seconds=(5.0, 8.0),
        needs_root=True,
        needs_hosts=True,
    ),
    "oneway": Kind(
        "packets of a host are dropped; those to it arrive",
        "host",
        r"host {host} .*is lost",
        seconds=(5.0, 8.0),
        needs_root=True,
        needs_hosts=True,
    ),
    "flap": Kind(
        "the link of a host is down for a moment",
        "host",
        seconds=(0.3, 1.0),
        needs_root=True,
        needs_hosts=True,
        ends_ranks=False,
    ),
    "slow": Kind(
        "the link of a host has 10 Mbit/s",
        "host",
        seconds=(3.0, 6.0),
        needs_root=True,
        needs_hosts=True,
        ends_ranks=False,
    ),
    "agent": Kind(
        "SIGKILL to the agent of a host", "host", r"host {host} .*is lost", needs_root=True, needs_hosts=True
    ),
}


def names_it(kind: str, text: str, *, rank: int, ranks: int, host: str) -> bool:
    """Whether an output of the run names a fault, with the right rank or host.

    >>> names_it("kill", "shoal: rank 2 of 4 was killed by signal 9 (SIGKILL)", rank=2, ranks=4, host="")
    True
    """
    pattern = KINDS[kind].report
    filled = pattern.replace("{rank}", str(rank)).replace("{ranks}", str(ranks)).replace("{host}", re.escape(host))
    return bool(pattern) and re.search(filled, text) is not None


def left_out(
    kinds: tuple[str, ...], *, is_root: bool, num_hosts: int, missing: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Kind → why it cannot be made here. `missing`: what this machine does not allow even root.

    >>> left_out(("kill", "oom", "slow"), is_root=False, num_hosts=1)
    {'oom': 'needs root', 'slow': 'needs --hosts 2'}
    """
    found = {name: why for name, why in (missing or {}).items() if name in kinds}
    for name in kinds:
        if KINDS[name].needs_hosts and num_hosts < 2:
            found[name] = "needs --hosts 2"
        elif KINDS[name].needs_root and not is_root:
            found[name] = "needs root"
    return found
