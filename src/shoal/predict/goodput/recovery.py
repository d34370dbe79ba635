"""What a fault costs: assumptions about faults, machines and checkpoints, each with its source."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOST_HOSTS = 0.25
"""The part of faults after which a host must be replaced. A restart of processes cures the others (DLRover: about
three quarters)."""
RESTART_BASE, RESTART_PER_DEVICE = 60.0, 0.0085
"""Seconds from a fault to the first step: a line through the restarts that Meta published of FT-HSDP (200, 300, 600 and
900 s on 16, 22, 64 and 98 thousand GPUs)."""
DETECTION = 5.0
"""Seconds until a hang is named. A killed process is seen sooner."""
HOST_COPY = 20e9
"""Bytes per second from a device to the memory of its host: most of PCIe 4 x16."""
STORAGE_PER_HOST = 1e9
"""Bytes per second that a host reads from shared storage, or writes to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A cluster, how often it fails, and what a run does about it. Times are in seconds.

    Every `interval` a checkpoint is copied to host memory, which costs `stall`, and is then written to the disk.
    """

    hosts: int
    per_host: int
    mtbf: float
    """Mean time between faults of one device."""
    stall: float
    write: float
    """From the copy until it is on the disk."""
    read: float
    """Of a checkpoint from the disk."""
    interval: float
    restart: float
    """From the end of the old processes to the first step, without `read`."""
    spares: int = 0
    repair: float = 86400.0
    """Until a lost host is back."""
    has_memory_tier: bool = False
    """Whether a restart takes the copy in host memory. Of several hosts, each has a copy for another one, too."""
    lost_hosts: float = LOST_HOSTS
    detection: float = DETECTION

    @property
    def between_faults(self) -> float:
        """Mean time between faults of the cluster."""
        return self.mtbf / (self.hosts * self.per_host)


def restart_seconds(devices: int) -> float:
    """Seconds of a restart on that many devices: assumed.

    >>> [round(restart_seconds(n * 1000)) for n in (16, 64, 98)]
    [196, 604, 893]
    """
    return RESTART_BASE + RESTART_PER_DEVICE * devices


def best_interval(cost: float, mtbf: float) -> float:
    """Seconds between two saves by Young's formula: they minimise the cost of saves plus the work lost to a failure.

    >>> round(best_interval(cost=0.5, mtbf=24 * 3600))
    294
    """
    return math.sqrt(2 * cost * mtbf)
