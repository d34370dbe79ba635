"""Memory of a rank over one step, by cause: read at the end of every part of a step that is not timed."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch

from shoal.comm.profile.timer import PartTimer
from shoal.parallel.inspect.live_memory import live_memory
from shoal.train.run import Run

MOST = 64
"""Readings of a step; a step of many microbatches repeats itself."""


class MemoryOverTime:
    """The readings of the first step of a timer, which is left out of its times."""

    def __init__(self, run: Run, timer: PartTimer) -> None:
        self.run, self.timer = run, timer
        self.readings: list[dict[str, Any]] = []
        timer.on_close = self._read

    def _read(self, part: str) -> None:
        if self.timer.steps or len(self.readings) == MOST:
            self.timer.on_close = None
            return
        with suppress(Exception):  # a model that cannot be counted is profiled all the same
            counted = live_memory(self.run.composed, self.run.optimizer)
            causes = {"parameters": counted.parameters, "gradients": counted.gradients, "optimizer": counted.optimizer}
            total = bytes_now(self.run.device)
            rest = max(0, total - sum(causes.values()))
            self.readings.append({"part": part, "total": total, **causes, "other": rest})


def bytes_now(device: torch.device) -> int:
    """Bytes of this process: by torch's allocator on a GPU, and resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
