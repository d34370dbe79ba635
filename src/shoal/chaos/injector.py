"""Make the faults of a schedule, and heal those that do not end by themselves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shoal.chaos.journal import Made
from shoal.chaos.kinds import KINDS
from shoal.chaos.machine.disk import Disk
from shoal.chaos.machine.memory_limit import ROOM, MemoryLimit
from shoal.chaos.machine.network import Network
from shoal.chaos.machine.processes import Process, descendants
from shoal.chaos.schedule import Injection

_ORDERS = {"gil": "hold_gil", "clock": "jump_clock", "oom": "take_memory"}
_MOST_LIMITED = 15.0
"""Seconds after which a limit of memory ends, also if no process was killed."""


@dataclass(slots=True)
class Injector:
    """Where faults are made: processes, the network, the disk and the memory of one run."""

    folder: Path
    network: Network
    disk: Disk
    memory: MemoryLimit | None
    ranks_per_host: int
    process: Process | None = None
    healing: list[tuple[float, Callable[[], None], Made]] = field(default_factory=list)
    """When something is to be restored, and how."""
    ordered: tuple[Injection, int] | None = None
    """An order that no rank has taken yet, and the process that should."""

    def make(self, injection: Injection) -> Made | None:
        """Make a fault; None: not yet, since its target is not there."""
        kind = injection.kind
        if kind == "supervisor":
            return self._kill_command(injection)
        if kind == "disk":
            self.disk.fill()
            return self._healed_later(injection, self.disk.empty)
        if KINDS[kind].target == "host":
            return self._on_host(injection)
        pid = self.pid_of(injection.rank)
        if pid is None:
            return None
        if kind in _ORDERS:
            return self._order(injection, pid)
        damaged = self.disk.flip_byte(injection.number) if kind == "corrupt" else None
        if kind == "corrupt" and damaged is None:
            return None
        return self._signal(injection, pid, damaged)

    def heal_due(self, *, all_now: bool = False, after: Made | None = None) -> None:
        """Restore what is due; or at once everything, or what one fault has changed."""
        now = time.monotonic()
        for each in list(self.healing):
            if all_now or now >= each[0] or each[2] is after:
                self.healing.remove(each)
                each[1]()
                each[2].until = time.monotonic()

    def pid_of(self, rank: int) -> int | None:
        """The living process of a rank that has loaded; None: there is none."""
        with suppress(OSError, ValueError):
            pid = int(json.loads((self.folder / "ranks" / f"{rank}.json").read_text())["pid"])
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return pid if state not in "ZXT" else None
        return None

    def _signal(self, injection: Injection, pid: int, damaged: int | None) -> Made | None:
        at = time.monotonic()
        try:
            os.kill(pid, signal.SIGSTOP if injection.kind == "stop" else signal.SIGKILL)
        except ProcessLookupError:
            return None
        return Made(injection, at, damaged=damaged)

    def _kill_command(self, injection: Injection) -> Made | None:
        if self.process is None or self.process.poll() is not None:
            return None
        at = time.monotonic()
        os.kill(self.process.pid, signal.SIGKILL)
        return Made(injection, at)

    def _order(self, injection: Injection, pid: int) -> Made | None:
        """Write an order; it counts from the moment at which the rank takes it."""
        path = self.folder / "orders" / f"{injection.rank}.json"
        if self.ordered is None:
            if injection.kind == "oom" and self.memory is not None:
                self.memory.tighten()
            order = {"do": _ORDERS[injection.kind], "seconds": injection.seconds, "bytes": 4 * ROOM}
            part = path.with_suffix(".part")
            part.write_text(json.dumps(order))
            part.replace(path)
            self.ordered = (injection, pid)
        if path.exists():
            return None
        self.ordered = None
        made = Made(injection, time.monotonic())
        if injection.kind == "oom" and self.memory is not None:
            self.healing.append((made.at + _MOST_LIMITED, self.memory.loosen, made))
        return made

    def _on_host(self, injection: Injection) -> Made | None:
        host = injection.rank // self.ranks_per_host
        name = self.network.names[host]
        if injection.kind == "agent":
            agent = self._agent_of(name)
            if agent is None:
                return None
            made = Made(injection, time.monotonic(), host=name)
            os.kill(agent, signal.SIGKILL)
            return made
        network = self.network
        {"slow": network.slow, "oneway": network.drop_outgoing}.get(injection.kind, network.cut)(host)
        made = self._healed_later(injection, lambda: network.heal(host))
        made.host = name if host else network.names[1]  # without a link, the coordinator's host loses the others
        return made

    def _healed_later(self, injection: Injection, heal: Callable[[], None]) -> Made:
        made = Made(injection, time.monotonic())
        self.healing.append((made.at + injection.seconds, heal, made))
        return made

    def _agent_of(self, host: str) -> int | None:
        """The process `shoal agent --name HOST`, of which others are forks."""
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                if "agent" in words and host in words and words[0] != "ip" and words[0] != "sh":
                    return pid
        return None
