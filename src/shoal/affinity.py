"""The cores that this process may use."""

from __future__ import annotations

import os


def num_cores() -> int:
    """Cores in the affinity mask; launchers and containers allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
