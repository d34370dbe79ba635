"""Start one process for each rank, wait for all, replace what failed if that is allowed, and leave none behind.

A replaced process gets the slot of the one that failed. Ranks are dealt again, survivors first, so that rank 0 is a
process that has the state of training. Each generation of ranks has its own port. Survivors read their new variables
from a file (`shoal.horovod.elastic.rejoin`).
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.comm.rendezvous.launcher_environment import LOOPBACK
from shoal.launch.stop_signals import queueing_signals

GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL for the other ranks, when one has failed."""
GRACE_AFTER_SIGNAL = 30.0
POLL = 0.02
_PR_SET_PDEATHSIG = 1

Environment = Callable[[int, int, int], dict[str, str]]
"""The variables of a rank, by rank, slot and number of ranks."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the processes ended, by rank."""

    exit_codes: list[int]
    """Negative: the signal that killed it."""
    failed_rank: int | None
    """The rank that failed first; None: none, or a signal ended the run."""
    signal_code: int = 0
    """128 plus the signal that ended the run; 0: none."""
    restarts: int = 0

    def how(self, rank: int) -> str:
        """How one rank ended."""
        return describe_exit(self.exit_codes[rank])


@dataclass(slots=True)
class _Processes:
    """The processes by slot, and the rank of each."""

    command: Sequence[str]
    size: int
    environment: Environment
    folder: Path
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    first: int | None = None
    """The slot that failed first."""
    deadline: float | None = None
    generation: int = 0
    port: int = 0

    def start_all(self) -> None:
        """Start the first generation."""
        self.port, self.ranks = _free_port(), {slot: slot for slot in range(self.size)}
        for slot in range(self.size):
            self.running[slot] = _started(self.command, self._variables(slot))

    def collect(self) -> None:
        """Note the processes that have ended."""
        for slot, process in list(self.running.items()):
            if (code := process.poll()) is not None:
                del self.running[slot]
                self.codes[slot] = code
                if code and self.first is None and self.deadline is None:
                    self.first = slot

    def replace(self, slot: int) -> None:
        """Deal ranks again, survivors first, write them for the survivors, and start a process in place of one."""
        order = [each for each in sorted(self.ranks, key=self.ranks.__getitem__) if each != slot]
        self.ranks = {each: rank for rank, each in enumerate([*order, slot])}
        self.generation, self.port, self.first = self.generation + 1, _free_port(), None
        path = self.folder / f"generation-{self.generation}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps({str(each): self._variables(each) for each in self.ranks}))
        part.replace(path)
        del self.codes[slot]
        self.running[slot] = _started(self.command, self._variables(slot))

    def send(self, number: int) -> None:
        """Signal every process and what it has started."""
        for process in self.running.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)

    def stop(self, number: int, seconds: float) -> None:
        """Pass a signal to all, and kill them after some seconds."""
        self.send(number)
        self.deadline = time.monotonic() + seconds

    def _variables(self, slot: int) -> dict[str, str]:
        own = {"MASTER_PORT": str(self.port), "SHOAL_KEY": self.key}
        own |= {"SHOAL_RUN_FOLDER": str(self.folder), "SHOAL_RUN_PROCESS": str(slot)}
        own |= {"TORCHELASTIC_RESTART_COUNT": str(self.generation)}
        return {**self.environment(self.ranks[slot], slot, self.size), **own}


def run_processes(command: Sequence[str], size: int, environment: Environment, restarts: int = 0) -> Ended:
    """Run a command on `size` ranks. They share the terminal, and never outlive this process."""
    signals: list[int] = []
    stopped_by = 0
    with tempfile.TemporaryDirectory(prefix="shoal-run-") as folder, queueing_signals(signals):
        processes = _Processes(command, size, environment, Path(folder))
        try:
            processes.start_all()
            while processes.running:
                processes.collect()
                if signals:
                    number = signals.pop(0)
                    processes.stop(number if not stopped_by else signal.SIGKILL, GRACE_AFTER_SIGNAL)
                    stopped_by = stopped_by or number
                elif processes.first is not None and processes.deadline is None:
                    _after_failure(processes, processes.first, restarts)
                elif processes.deadline is not None and time.monotonic() > processes.deadline:
                    processes.send(signal.SIGKILL)
                time.sleep(POLL)
        finally:
            processes.send(signal.SIGKILL)
    codes = {rank: processes.codes.get(slot, 0) for slot, rank in processes.ranks.items()}
    failed = None if stopped_by or processes.first is None else processes.ranks[processes.first]
    return Ended(
        [codes[rank] for rank in range(size)], failed, 128 + stopped_by if stopped_by else 0, processes.generation
    )


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    if code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


def _after_failure(processes: _Processes, slot: int, restarts: int) -> None:
    """Replace the process, if that is allowed and others live on; else end them all."""
    if processes.generation >= restarts or not processes.running:
        processes.stop(signal.SIGTERM, GRACE)
        return
    how = describe_exit(processes.codes[slot])
    print(f"shoal run: rank {processes.ranks[slot]} {how}, and is replaced", file=sys.stderr, flush=True)
    processes.replace(slot)


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
