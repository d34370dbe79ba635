"""Metrics of a run: one JSON object per line, and trackers if configured.

Every sink takes the same flat record `{"step": 3, "loss": 5.1, ...}`. The keys are documented in docs/metrics.md.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from shoal.errors import needs
from shoal.files import opened
from shoal.observe.durable_write import room, sync
from shoal.observe.jsonable import jsonable

Record = Mapping[str, Any]
Say = Callable[[str], None]


class Sink(Protocol):
    """A destination of records."""

    def write(self, record: Record) -> None:
        """Write one record."""

    def close(self) -> None:
        """Make all records durable and close."""


class JsonLines:
    """A file with one JSON object per line and no partial lines.

    A full or failing disk does not end the run: lines wait in memory and are written with a later one. Lines that do
    not fit there, or still wait at the end, are lost and reported.
    """

    MOST_WAITING = 10_000
    """The largest number of waiting lines; the oldest are lost first."""

    def __init__(self, path: Path, say: Say | None = None) -> None:
        self._path, self._say = path, say or print_to_stderr
        self._file = opened(path, "ab", buffering=0)
        self._waiting: deque[tuple[int, bytes]] = deque()
        """Steps and lines that are not written yet."""
        self._lost: list[int] = []
        """The first and the last step whose lines are lost."""
        self._is_failing = False

    def write(self, record: Record) -> None:
        """Append one line."""
        self._waiting.append((int(record["step"]), json.dumps(jsonable(record)).encode() + b"\n"))
        if len(self._waiting) > self.MOST_WAITING:
            step, _ = self._waiting.popleft()
            self._lost = [*self._lost[:1], step]
        try:
            self._flush()
        except OSError as error:
            if not self._is_failing:
                first, why = self._waiting[0][0], f"{error.strerror}{room(self._path, error)}"
                self._say(f"{self._path} lacks its lines since step {first}: {why}; training continues without them")
            self._is_failing = True
        else:
            if self._is_failing:
                self._say(f"{self._path} is written again; {self._lost_words() or 'no line is lost'}")
            self._is_failing = False

    def close(self) -> None:
        """Return when all lines are on the disk, or report those that are lost."""
        try:
            self._flush()
            os.fsync(self._file.fileno())
            sync(self._path.parent)
        except OSError as error:
            if self._waiting:
                self._lost = [*self._lost[:1], *(step for step, _ in (self._waiting[0], self._waiting[-1]))]
            words = self._lost_words() or "the last lines may be lost"
            self._say(f"{self._path} was not finished: {error.strerror}{room(self._path, error)}; {words}")
        finally:
            self._file.close()

    def _flush(self) -> None:
        """Write the waiting lines; a partly written line is truncated."""
        while self._waiting:
            _, line = self._waiting[0]
            before = os.fstat(self._file.fileno()).st_size
            try:
                done = 0
                while done < len(line):
                    done += self._file.write(line[done:]) or 0
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file.fileno(), before)
                raise
            self._waiting.popleft()

    def _lost_words(self) -> str:
        return f"the lines of steps {self._lost[0]} to {self._lost[-1]} are lost" if self._lost else ""


class Guarded:
    """A tracker that is disabled at its first failure, which is reported; the run continues."""

    def __init__(self, name: str, sink: Sink, say: Say) -> None:
        self._name, self._sink, self._say = name, sink, say
        self._has_failed = False

    def write(self, record: Record) -> None:
        """Forward a record, unless an earlier one has failed."""
        self._try(lambda: self._sink.write(record), f"since step {record['step']}")

    def close(self) -> None:
        """Close the tracker."""
        self._try(self._sink.close, "at the end")

    def _try(self, act: Callable[[], None], when: str) -> None:
        if self._has_failed:
            return
        try:
            act()
        except Exception as error:  # each tracker has its own
            self._has_failed = True
            self._say(f"the tracker {self._name} has no records {when}: {type(error).__name__}: {error}")


def print_to_stderr(text: str) -> None:
    """Print a message of a rank without a progress line."""
    print(f"shoal: {text}", file=sys.stderr, flush=True)


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
    """A run in W&B; WANDB_MODE selects offline or online."""

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
    """A run in MLflow; MLFLOW_TRACKING_URI selects the tracking server."""

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
    """The numeric entries of a record, without the step."""
    return {n: v for n, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool) and n != "step"}


def peak_memory_gib(device: torch.device) -> float:
    """The measured peak allocation on the device so far; on a CPU, the peak resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss counts bytes there and KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
