"""What the supervisor knows of one rank: its heartbeat, and the state of its process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.comm.heartbeat.ticket import Ticket
from shoal.files import read_small


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The newest heartbeat of a rank. All ages are in seconds."""

    counters: Mapping[str, tuple[int, int]]
    """Channel → last entered, last completed. A channel is a backend with a group, a direction between two ranks of a
    group, or `board`."""
    age: float = 0.0
    """Since the beat."""
    still: float = 0.0
    """Since counters, phase or step last changed."""
    phase: str = "step"
    step: int = 0
    median_step: float = 0.0
    groups: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Group → its axis, its ranks."""
    tickets: tuple[Ticket, ...] = ()
    uses_gpu: bool = False
    is_partial: bool = False
    """Channels without a pending call are left out: a large world has more than fit on the board."""

    @classmethod
    def parse(cls, beat: Mapping[str, Any], *, age: float, still: float) -> Reading:
        """Read a heartbeat from the board."""
        return cls(
            counters={name: (pair[0], pair[1]) for name, pair in beat["counters"].items()},
            age=age,
            still=still,
            phase=beat["phase"],
            step=beat["step"],
            median_step=beat["median"],
            groups={name: (axis, tuple(ranks)) for name, (axis, ranks) in beat["groups"].items()},
            tickets=tuple(_ticket(each) for each in beat["tickets"]),
            uses_gpu=beat.get("uses_gpu", False),
            is_partial=beat.get("is_partial", False),
        )


def progress_of(beat: Mapping[str, Any]) -> tuple[Any, ...]:
    """The part of a heartbeat that moves while a rank makes progress."""
    return beat["counters"], beat["phase"], beat["step"], beat.get("total")


def _ticket(written: Mapping[str, Any]) -> Ticket:
    sizes = tuple(tuple(size) for size in written["sizes"])
    return Ticket(**{**written, "dtypes": tuple(written["dtypes"]), "sizes": sizes})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """The state of a worker's process; the defaults where there is no /proc."""

    letter: str = "S"
    """R running, S sleeping, D waiting for a device, T stopped by a signal, t by a debugger, Z ended."""
    wchan: str = ""
    """The function of the kernel in which it sleeps."""
    is_traced: bool = False
    """A debugger is attached."""
    cpu_seconds: float = 0.0
    """Of all its threads, and the time in which the main thread was ready to run and had no core."""
    busy: float = 0.0
    """The fraction of the last seconds in which it computed, or had to wait for a core; 2.0 is two cores."""
    stopped: float = 0.0
    """Seconds in state T."""


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) has stopped a process; a debugger's stop is another state."""
    return _stat(pid)[:1] == ["T"]


def _stat(pid: int) -> list[str]:
    """The fields of `stat` after the name, which may hold spaces and parentheses; empty: there is no such process."""
    try:
        return read_small(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return []


def read_state(pid: int) -> ProcessState:
    """Read the state of a process."""
    folder = Path(f"/proc/{pid}")
    try:
        status = (folder / "status").read_text()
    except OSError:
        return ProcessState()
    fields = _stat(pid)
    if not fields:  # it has ended in between
        return ProcessState()
    tracer = next((line.split()[1] for line in status.splitlines() if line.startswith("TracerPid:")), "0")
    return ProcessState(
        letter=fields[0],
        wchan=_wchan(folder),
        is_traced=fields[0] == "t" or tracer != "0",
        cpu_seconds=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + _seconds_without_core(folder),
    )


def cpu_of_descendants(pid: int) -> float:
    """CPU seconds of the processes that a process has started, and of theirs: of a compiler, of loaders.

    Those that have ended and were waited for are counted by the kernel in the process that waited.
    """
    total, left, seen = _cpu(pid, own=False), _children(pid), {pid}
    while left:
        child = left.pop()
        if child not in seen:
            seen.add(child)
            total += _cpu(child, own=True)
            left += _children(child)
    return total


def _cpu(pid: int, *, own: bool) -> float:
    """CPU seconds of the ended children of a process, and its own."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return 0.0
    return sum(map(int, fields[11 if own else 13 : 15])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def _seconds_without_core(folder: Path) -> float:
    """How long the main thread was ready to run while other processes had all cores."""
    try:
        return int((folder / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # a kernel without these numbers
        return 0.0


def _wchan(folder: Path) -> str:
    try:
        name = (folder / "wchan").read_text().strip()
    except OSError:  # some kernels show it to the owner alone
        return ""
    return "" if name == "0" else name
