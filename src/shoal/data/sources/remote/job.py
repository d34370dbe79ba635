"""The job of a process: the ranks of a host that one launcher has started are one job."""

from __future__ import annotations

import os
import socket

from shoal.comm.rendezvous.launcher_environment import read_environment
from shoal.errors import ShoalError


def job_of_this_process() -> str:
    """The host, and the launcher's process if there is one, else this process."""
    try:
        has_launcher = read_environment(os.environ) is not None
    except ShoalError:  # reported where the run reads it
        has_launcher = False
    pid = os.getppid() if has_launcher else os.getpid()
    return f"{socket.gethostname()} {pid} {_started(pid)}"


def _started(pid: int) -> str:
    """When a process was started, since numbers of processes are used again; empty: not known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
