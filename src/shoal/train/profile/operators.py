"""The operators that take most of the time, by torch's profiler. It slows steps down, so none of them is timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MOST = 10
"""Operators that are listed."""


@dataclass
class OperatorTrace:
    """A running profiler of torch."""

    profiler: Any
    is_running: bool = True

    @classmethod
    def begin(cls) -> OperatorTrace:
        """Start to trace."""
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
        profiler.start()
        return cls(profiler)

    def stop(self) -> None:
        """Stop to trace."""
        if self.is_running:
            self.is_running = False
            self.profiler.stop()

    def end(self) -> dict[str, Any]:
        """Stop, and list the operators by their own time: `{"operators": [...]}`."""
        self.stop()
        found = [event for event in self.profiler.key_averages() if event.key.startswith("aten::")]
        total = sum(event.self_cpu_time_total for event in found) or 1.0
        top = sorted(found, key=lambda event: -event.self_cpu_time_total)[:MOST]
        return {
            "operators": [
                {
                    "operator": event.key.removeprefix("aten::"),
                    "calls": event.count,
                    "fraction": event.self_cpu_time_total / total,
                }
                for event in top
            ]
        }
