"""Start one process for each rank, wait for all, and leave none behind."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shoal.comm.rendezvous.environment import LOOPBACK
from shoal.launch.stop_signals import queueing_signals

GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL for the other ranks, when one has failed."""
GRACE_AFTER_SIGNAL = 30.0
POLL = 0.02
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Ended:
    """How the processes ended, by rank."""

    exit_codes: list[int]
    """Negative: the signal that killed it."""
    failed_rank: int | None
    """The rank that failed first; None: none, or a signal ended the run."""
    signal_code: int = 0
    """128 plus the signal that ended the run; 0: none."""

    def how(self, rank: int) -> str:
        """How one rank ended."""
        code = self.exit_codes[rank]
        if code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code}"


@dataclass(slots=True)
class _Processes:
    running: dict[int, subprocess.Popen[bytes]]
    codes: dict[int, int] = field(default_factory=dict)
    first: int | None = None
    deadline: float | None = None

    def collect(self) -> None:
        """Note the processes that have ended."""
        for rank, process in list(self.running.items()):
            if (code := process.poll()) is not None:
                del self.running[rank]
                self.codes[rank] = code
                if code and self.first is None and self.deadline is None:
                    self.first = rank

    def send(self, number: int) -> None:
        """Signal every process and what it has started."""
        for process in self.running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def stop(self, number: int, seconds: float) -> None:
        """Ask all to end, and end them after some seconds."""
        self.send(number)
        self.deadline = time.monotonic() + seconds


def run_processes(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> Ended:
    """Run a command once for each environment. They share the terminal, and never outlive this process."""
    shared = {"MASTER_PORT": str(_free_port()), "SHOAL_KEY": secrets.token_hex(32)}
    signals: list[int] = []
    stopped_by = 0
    with queueing_signals(signals):
        processes = _Processes({rank: _started(command, {**shared, **env}) for rank, env in enumerate(environments)})
        try:
            while processes.running:
                processes.collect()
                if signals:
                    number = signals.pop(0)
                    processes.stop(number if not stopped_by else signal.SIGKILL, GRACE_AFTER_SIGNAL)
                    stopped_by = stopped_by or number
                elif processes.first is not None and processes.deadline is None:
                    processes.stop(signal.SIGTERM, GRACE)
                elif processes.deadline is not None and time.monotonic() > processes.deadline:
                    processes.send(signal.SIGKILL)
                time.sleep(POLL)
        finally:
            processes.send(signal.SIGKILL)
    codes = [processes.codes[rank] for rank in range(len(environments))]
    if stopped_by:
        return Ended(codes, None, 128 + stopped_by)
    return Ended(codes, processes.first)


def _started(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    libc: Any = ctypes.CDLL(None)

    def end_with_parent() -> None:
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    return subprocess.Popen(list(command), env={**os.environ, **variables}, process_group=0, preexec_fn=end_with_parent)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
