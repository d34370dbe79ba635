"""Metrics of a run: one JSON object per line, always; trackers beside it when asked for.

Every sink takes the same flat record `{"step": 3, "loss": 5.1, ...}`. The keys are documented in docs/metrics.md.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from shoal.errors import needs

Record = Mapping[str, Any]


class Sink(Protocol):
    """Somewhere that records go."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def close(self) -> None:
        """Everything taken so far is durable afterwards."""


class JsonLines:
    """A file with one JSON object per line; each line is there as soon as it is written. What a full disk does not take
    is kept and tried again with the next line: no run ends for it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._left = b""
        """What is still to be written."""

    def write(self, record: Record) -> None:
        """Append one line."""
        self._left += json.dumps(jsonable(record)).encode() + b"\n"
        with suppress(OSError):
            while self._left:
                self._left = self._left[self._file.write(self._left) or 0 :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files in the run directory."""

    def __init__(self, directory: Path, name: str, settings: Record) -> None:
        needs("tensorboard", what="the tracker tensorboard", extra="tensorboard")
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(directory))

    def write(self, record: Record) -> None:
        """Every number as a scalar."""
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """A run in W&B; offline and online are its own settings (WANDB_MODE)."""

    def __init__(self, directory: Path, name: str, settings: Record) -> None:
        self._run = needs("wandb", what="the tracker wandb", extra="wandb").init(
            dir=str(directory), name=name, config=dict(settings)
        )

    def write(self, record: Record) -> None:
        """Every number, at its step."""
        self._run.log(numbers(record), step=record["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """A run in MLflow; the tracking server is its own setting (MLFLOW_TRACKING_URI)."""

    def __init__(self, directory: Path, name: str, settings: Record) -> None:
        self._mlflow = needs("mlflow", what="the tracker mlflow", extra="mlflow")
        self._mlflow.start_run(run_name=name)
        self._mlflow.log_dict(dict(settings), "recipe.json")

    def write(self, record: Record) -> None:
        """Every number, at its step."""
        self._mlflow.log_metrics(numbers(record), step=record["step"])

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


TRACKERS: dict[str, Callable[[Path, str, Record], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def numbers(record: Record) -> dict[str, float]:
    """The entries of a record that are numbers, but for the step itself."""
    return {n: v for n, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool) and n != "step"}


def peak_memory_gib(device: torch.device) -> float:
    """Measured: the largest allocation on the device so far; on a CPU, the largest resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes there and KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def jsonable(record: Record) -> dict[str, Any]:
    """The record with NaN and infinity, which JSON has no words for, as strings.

    >>> jsonable({"step": 1, "loss": float("nan")})
    {'step': 1, 'loss': 'nan'}
    """
    return {n: str(v) if isinstance(v, float) and not math.isfinite(v) else v for n, v in record.items()}
