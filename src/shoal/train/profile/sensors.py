"""Clocks, power and temperature of a GPU while steps are profiled, by NVML.

A thread reads them through pynvml, if that is installed; else a process of `nvidia-smi` does. Neither is needed, and
neither is waited for longer than a second: a sick GPU may not answer.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

FIELDS = ("clock_mhz", "clock_mhz_max", "power_watts", "power_watts_limit", "temperature_celsius")
QUERY = "clocks.sm,clocks.max.sm,power.draw,enforced.power.limit,temperature.gpu"
PERIOD = 0.05
"""Seconds between two readings."""


class Sensors:
    """Reads the sensors of one GPU until it is stopped."""

    def __init__(self, device: torch.device) -> None:
        self._stop, self._rows = threading.Event(), list[Sequence[float]]()
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

    def stop(self) -> dict[str, float]:
        """Stop reading; field → the median of its readings. Empty: there are none."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)
            return medians(self._rows)
        if self._process is None:
            return {}
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._output.seek(0)
        text, self._process = self._output.read().decode(errors="replace"), None
        self._output.close()
        return medians(parse_rows(text))

    def _read(self, read: Callable[[], Sequence[float]]) -> None:
        while not self._stop.wait(PERIOD):
            with suppress(Exception):  # a reading that this GPU does not have
                self._rows.append(read())


def parse_rows(text: str) -> list[list[float]]:
    """The rows that nvidia-smi prints; the last one may be cut off.

    >>> parse_rows("1980, 1980, 512.3, 700.00, 54\\n1965, 1980, [N/A], 700.00, 54\\n1980, 19")
    [[1980.0, 1980.0, 512.3, 700.0, 54.0], [1965.0, 1980.0, nan, 700.0, 54.0]]
    """
    rows = [line.split(", ") for line in text.splitlines()]
    return [[_number(cell) for cell in row] for row in rows if len(row) == len(FIELDS)]


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
