"""Memory in use on this host and by its workers, sampled while they run.

When the kernel has killed a process for lack of memory, its numbers are gone, and current use would be too low. So the
launcher samples them in every turn.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.files import read_small
from shoal.launch import cgroup

SHORT_OF_MEMORY = 0.9  # of the host's memory in use


@dataclass(slots=True)
class Memory:
    """The memory use of this host in the last seconds, and of each worker."""

    total: int = 0
    recent: tuple[int, ...] = ()
    kills: tuple[tuple[int, int | None], ...] = ()
    """Kills for lack of memory at each of the last looks: of the host, which are not read where this control group
    has a counter, and of this group (None: it has none). One of days ago does not explain that of now."""
    workers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Rank → bytes in memory when first seen, and the most that was seen."""

    def look(self, pids: Mapping[int, int] | None = None) -> None:
        """Record the memory in use now, also of the processes of these ranks."""
        own = cgroup.oom_kills()
        self.kills = (*self.kills[-24:], (_counter("/proc/vmstat", "oom_kill") if own is None else 0, own))
        available, self.total = (size * 1024 for size in _counters("/proc/meminfo", "MemAvailable:", "MemTotal:"))
        self.recent = (*self.recent[-24:], self.total - available)
        for rank, pid in (pids or {}).items():
            if resident := resident_bytes(pid):
                first, most = self.workers.get(rank, (resident, 0))
                self.workers[rank] = (first, max(most, resident))

    def explanation(self) -> str:
        """The end of a sentence about a lack of host memory; empty: there was none."""
        used = max(self.recent, default=0)
        numbers = f"host memory in use was {used / 2**30:.1f} of {self.total / 2**30:.1f} GiB"
        if self._group_killed():
            most = cgroup.limit()
            of = f"; its limit is {most / 2**30:.1f} GiB" if most else ""
            return f": the kernel killed a process of this control group for lack of memory{of}; {numbers}"
        if self._host_killed():
            return f": the kernel killed a process for lack of memory; {numbers}"
        return f"; {numbers}: it likely ran out" if used > SHORT_OF_MEMORY * self.total > 0 else ""

    def has_run_out(self) -> bool:
        """Whether the kernel has killed a process for lack of memory in the last seconds."""
        return self._group_killed() or self._host_killed()

    def of_worker(self, rank: int) -> dict[str, int]:
        """Bytes of a worker: `outside` of tensors, when it started; in `total`; and the `limit` of each worker."""
        if rank not in self.workers:
            return {}
        first, most = self.workers[rank]
        limit = min(filter(None, (cgroup.limit(), self.total)), default=0)
        return {"outside": first, "total": most, "limit": limit // len(self.workers)}

    def _group_killed(self) -> bool:
        own = cgroup.oom_kills()
        return own is not None and bool(self.kills) and own > (self.kills[0][1] or 0)

    def _host_killed(self) -> bool:
        """Whether the host killed any process, where this control group has no counter."""
        is_counted = cgroup.oom_kills() is None and bool(self.kills)
        return is_counted and _counter("/proc/vmstat", "oom_kill") > self.kills[0][0]


def resident_bytes(pid: int | str = "self") -> int:
    """Bytes of a process that are in memory now; 0: not known."""
    try:
        return int(read_small(f"/proc/{pid}/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _counter(path: str, name: str) -> int:
    """A number from one of the kernel's tables; 0: there is none."""
    return _counters(path, name)[0]


def _counters(path: str, *names: str) -> list[int]:
    """Several of them, from one reading."""
    try:
        words = [line.split() for line in read_small(path).splitlines() if line.startswith(names)]
    except OSError:
        return [0] * len(names)
    found = {line[0]: int(line[1]) for line in words if line[0] in names}
    return [found.get(name, 0) for name in names]
