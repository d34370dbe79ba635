"""The state of a process from /proc; empty where there is no /proc, or no such process."""

from __future__ import annotations

from pathlib import Path


def state_of(pid: int) -> str:
    """One letter: R running, S sleeping, D waiting for a device, T stopped by a signal, Z ended and not yet reaped."""
    return (_fields(pid) or [""])[0]


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP) has stopped it; a debugger's stop is another state."""
    return state_of(pid) == "T"


def _fields(pid: int) -> list[str]:
    """The fields of `stat` after the name, which may hold spaces and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
