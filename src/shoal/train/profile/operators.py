"""The operators and kernels that take most of the time, by torch's profiler. It slows steps down, so none of them is
timed by part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType

from shoal.observe.profile.kernels import Kernel

MOST = 10
"""Operators that are listed."""
COPIES = ("Memcpy", "Memset")
"""Work of a GPU that is no kernel."""


@dataclass
class OperatorTrace:
    """A running profiler of torch."""

    profiler: Any
    device: torch.device
    is_running: bool = True
    seconds: float = 0.0
    """From the start to the end; on a GPU, of what was queued between them."""
    _start: float = field(default_factory=time.perf_counter)

    @classmethod
    def begin(cls, device: torch.device) -> OperatorTrace:
        """Start to trace."""
        kinds = torch.profiler.ProfilerActivity
        # Of a GPU its kernels alone: operators, too, made steps of many small kernels half as long again (H200).
        profiler = torch.profiler.profile(
            activities=[kinds.CUDA if device.type == "cuda" else kinds.CPU], acc_events=True
        )
        _wait(device)  # kernels of the steps before are none of the traced ones
        profiler.start()
        return cls(profiler, device)

    def stop(self) -> None:
        """Stop to trace."""
        if self.is_running:
            self.is_running = False
            _wait(self.device)
            self.seconds = time.perf_counter() - self._start
            self.profiler.stop()

    def operators(self) -> dict[str, Any]:
        """Stop, and list the operators by their own time, of a CPU: `{"operators": [...]}`."""
        self.stop()
        if self.device.type == "cuda":
            return {}
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

    def kernels(self) -> list[Kernel]:
        """Stop, and list every run of a kernel. Times are of CLOCK_MONOTONIC, as those of the parts."""
        self.stop()
        offset = time.time_ns() - time.monotonic_ns()
        events = self.profiler.profiler.kineto_results.events()
        return [
            Kernel(event.name(), event.start_ns() - offset, event.end_ns() - offset, event.device_resource_id())
            for event in device_events(events)
        ]


def device_events(events: Sequence[Any]) -> list[Any]:
    """The runs of kernels among the events of torch's profiler.

    A named part of the host has a shadow on the GPU, from its first kernel to its last one: that is no kernel.
    """
    hosts = {event.name() for event in events if event.device_type() == DeviceType.CPU}
    found = [event for event in events if event.device_type() == DeviceType.CUDA and event.name() not in hosts]
    return [event for event in found if not event.name().startswith(COPIES)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
