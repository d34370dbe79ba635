"""Clocks, power and temperature of a GPU while steps are profiled, by NVML.

A thread reads them through pynvml, if that is installed; else a process of `nvidia-smi` does. Neither is needed, and
neither is waited for longer than a second: a sick GPU may not answer. Every reading has its time, since the GPU is
idle before the profiled steps and after them.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import torch

FIELDS = ("clock_mhz", "clock_mhz_max", "power_watts", "power_watts_limit", "temperature_celsius")
QUERY = "timestamp,clocks.sm,clocks.max.sm,power.draw,enforced.power.limit,temperature.gpu"
STAMP = "%Y/%m/%d %H:%M:%S.%f"
"""How nvidia-smi writes a time, which is the local one."""
Reading = tuple[int, Sequence[float]]
"""When it was made, in ns of CLOCK_MONOTONIC, and the fields."""
PERIOD = 0.05
"""Seconds between two readings."""


class Sensors:
    """Reads the sensors of one GPU until it is stopped."""

    def __init__(self, device: torch.device) -> None:
        self._stop, self._readings = threading.Event(), list[Reading]()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._output: Any = None
        if (read := _nvml_reader(device)) is not None:
            self._thread = threading.Thread(target=self._read, args=(read,), daemon=True)
            self._thread.start()
            return
        with suppress(OSError):
            self._output = tempfile.TemporaryFile()  # noqa: SIM115
            command = ["nvidia-smi", "-i", _uuid(device), f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
            self._process = subprocess.Popen(
                [*command, "-lms", str(round(PERIOD * 1000))], stdout=self._output, stderr=subprocess.DEVNULL
            )

    def medians(self, begin: int, end: int) -> dict[str, float]:
        """Stop reading; field → the median of its readings between two times, in ns of CLOCK_MONOTONIC. Empty: there
        are none."""
        self.stop()
        return medians(row for when, row in self._readings if begin <= when <= end)

    def stop(self) -> None:
        """Stop reading."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)
        if self._process is None:
            return
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._output.seek(0)
        text, self._process = self._output.read().decode(errors="replace"), None
        self._output.close()
        self._readings = parse_rows(text, time.time_ns() - time.monotonic_ns())

    def _read(self, read: Callable[[], Sequence[float]]) -> None:
        while not self._stop.wait(PERIOD):
            with suppress(Exception):  # a reading that this GPU does not have
                row = read()
                self._readings.append((time.monotonic_ns(), row))


def parse_rows(text: str, offset: int) -> list[Reading]:
    """The rows that nvidia-smi prints; the last one may be cut off. `offset`: ns from CLOCK_MONOTONIC to the time of
    day."""
    found: list[Reading] = []
    for line in text.splitlines():
        stamp, *cells = line.split(", ")
        with suppress(ValueError):  # a message in place of a row
            when = round(datetime.strptime(stamp, STAMP).timestamp() * 1e9) - offset
            if len(cells) == len(FIELDS):
                found.append((when, [_number(cell) for cell in cells]))
    return found


def medians(rows: Iterable[Sequence[float]]) -> dict[str, float]:
    """Field → the median of its readings, without those that are missing."""
    columns = zip(*rows, strict=True)
    known: Mapping[str, list[float]] = {
        name: [value for value in column if value == value] for name, column in zip(FIELDS, columns, strict=False)
    }
    return {name: statistics.median(values) for name, values in known.items() if values}


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return float("nan")


def _nvml_reader(device: torch.device) -> Callable[[], Sequence[float]] | None:
    """A function that reads all fields; None: there is no pynvml, or it does not answer."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(_uuid(device))
        limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        fastest = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
    except Exception:  # not installed, or no permission, as in some containers
        return None

    def read() -> Sequence[float]:
        return (
            pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
            fastest,
            pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            limit,
            pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        )

    return read


def _uuid(device: torch.device) -> str:
    """As NVML spells it: the number of a device depends on CUDA_VISIBLE_DEVICES."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
