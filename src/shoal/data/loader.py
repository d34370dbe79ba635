"""Load batches: a rank's share of each step's global batch, prepared ahead of use.

torch's `DataLoader` runs the worker processes here. Alone it cannot resume, since its position is that of its workers,
which have run ahead. It starts processes even where a thread would do. It also draws a number from the global
generator, which changes the model's randomness. The position of a `Loader` is one integer: the samples that the
*consumer* has taken over all ranks. A batch is a pure function of its position:

    consumer     position ──▶ p      p+b     p+2b            Loader(..., position=p) continues here, on any degree
    prefetched                        ▒▒▒▒    ▒▒▒▒            made ahead, not counted, made again after a restart
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from shoal.data.dataset import Batch, Dataset
from shoal.data.mixture import batch_ids
from shoal.data.order import share
from shoal.data.prefetch import Inline, Prefetch, Processes, Thread
from shoal.errors import ShoalError

SLOW_BATCH = 0.010
"""Seconds per batch above which `auto` starts processes, which themselves cost a few milliseconds per batch."""

FAST_BATCH = 0.0005
"""Seconds per batch below which `auto` makes in-memory batches on demand, unless they are pinned."""

MOST_PROCESSES = 4


@dataclass(frozen=True)
class RankStream:
    """The samples of one rank, as a function of the position. Frozen, so that workers can have a copy."""

    dataset: Dataset
    seed: int
    batch: int
    """Samples per step, over all ranks."""
    coordinate: int = 0
    degree: int = 1

    def __getitem__(self, position: int) -> Batch:
        """This rank's part of the global batch that starts at `position`."""
        part = share(self.batch, self.coordinate, self.degree)
        return self.dataset.batch(batch_ids(self.dataset, self.seed, position, self.batch, part))


class Loader:
    """An endless iterator over this rank's share of every step's global batch.

    `workers` is the number of processes that prepare batches; 0 means one thread of this process. `auto` times the
    first two batches, chooses processes, a thread or neither, and writes the reason into `decision`. The batches are
    the same in all cases.
    `pin` puts them into page-locked memory, from which a GPU copies faster; without CUDA it does nothing.
    `timeout` is the longest wait for a batch in seconds; None: no limit.
    """

    def __init__(
        self,
        stream: RankStream,
        *,
        position: int = 0,
        workers: int | Literal["auto"] = "auto",
        prefetch: int = 2,
        pin: bool = False,
        timeout: float | None = None,
    ) -> None:
        _check(stream, position)
        self._share = stream
        self._position = position
        self._workers = workers
        self._prefetch = prefetch
        self._pin = pin and torch.cuda.is_available()
        self._timeout = timeout
        self._timed: deque[Batch] = deque()  # made while timing, returned first
        self._source: Prefetch | None = None
        self._stop: weakref.finalize[[], Loader] | None = None
        self._closed = False
        self.decision = ""
        """The way in which batches are prepared, and the reason; empty before the first batch."""
        self.num_processes = 0
        """Processes that prepare batches; 0: none, or before the first batch."""
        self.seconds_waited = 0.0
        """Seconds that the consumer has waited for batches so far."""

    @property
    def position(self) -> int:
        """The samples that all ranks together have taken so far. Prefetched batches do not count."""
        return self._position

    @property
    def batch(self) -> int:
        """Samples per step, over all ranks."""
        return self._share.batch

    @property
    def labels_per_sample(self) -> int | None:
        """The labels of every sample that count; None: they vary."""
        return self._share.dataset.labels_per_sample

    @property
    def epoch(self) -> float:
        """The number of passes over the dataset so far, as a fraction."""
        return self._position / len(self._share.dataset)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise RuntimeError("this Loader is closed; create a new one with position=loader.position")
        began = time.perf_counter()
        try:
            batch = self._take()
        except BaseException:
            self.close()
            raise
        finally:
            self.seconds_waited += time.perf_counter() - began
        self._position += self._share.batch
        return batch

    def close(self) -> None:
        """End the thread or the processes. Garbage collection or an exception of the Loader does it too."""
        self._closed = True
        self._timed.clear()
        self._source = None
        if self._stop is not None:
            self._stop()

    def _take(self) -> Batch:
        if self._source is None:
            self._start()
        assert self._source is not None
        return self._timed.popleft() if self._timed else self._source.take()

    def _start(self) -> None:
        workers = self._decide()
        self.num_processes = workers or 0
        position = self._position + len(self._timed) * self._share.batch
        positions = range(position, 2**62, self._share.batch)
        prefetch, pin, timeout = self._prefetch, self._pin, self._timeout
        source: Prefetch
        if workers is None:
            source = Inline(self._share, positions)
        elif workers:
            source = Processes(self._share, positions, workers=workers, prefetch=prefetch, pin=pin, timeout=timeout)
        else:
            source = Thread(self._share, positions, prefetch=prefetch, pin=pin, timeout=timeout)
        self._source = source
        self._stop = weakref.finalize(self, source.stop)

    def _decide(self) -> int | None:
        """The number of processes; 0: a thread; None: neither."""
        if self._workers != "auto":
            self.decision = f"{_named(self._workers)}, as set"
            return self._workers
        seconds = []
        for number in range(2):
            began = time.perf_counter()
            batch = self._share[self._position + number * self._share.batch]
            seconds.append(time.perf_counter() - began)
            self._timed.append({key: value.pin_memory() for key, value in batch.items()} if self._pin else batch)
        fastest = min(seconds)  # the first batch includes cold caches and imports
        is_inline = self._share.dataset.is_in_memory and fastest < FAST_BATCH and not self._pin
        workers = None if is_inline else 0 if fastest <= SLOW_BATCH else min(MOST_PROCESSES, os.cpu_count() or 1)
        self.decision = (
            f"{_named(workers)}: a batch took {fastest * 1e3:.1f} ms in process"
            f" (measured; from memory, no thread below {FAST_BATCH * 1e3:g} ms;"
            f" processes above {SLOW_BATCH * 1e3:g} ms)"
        )
        return workers


def evaluation_batches(dataset: Dataset, *, batch: int, coordinate: int = 0, degree: int = 1) -> Iterator[Batch]:
    """This rank's share of every sample exactly once, in order and without padding; the last batch may be smaller.

    Where a batch has fewer samples than ranks, some ranks skip it. So ranks may get different numbers of batches.
    """
    for start in range(0, len(dataset), batch):
        part = share(min(batch, len(dataset) - start), coordinate, degree)
        if part.stop > part.start:
            yield dataset.batch(np.arange(start + part.start, start + part.stop, dtype=np.int64))


def _named(workers: int | None) -> str:
    if workers is None:
        return "no thread"
    return f"{workers} process{'es' if workers > 1 else ''}" if workers else "one thread"


def _check(stream: RankStream, position: int) -> None:
    if len(stream.dataset) == 0:
        raise ShoalError(
            "the dataset must have at least one sample, got 0", fix="--data.source PATH with samples", code="D026"
        )
    if stream.batch < stream.degree:
        raise ShoalError(
            f"the batch must have a sample for each of {stream.degree} data-parallel ranks, got {stream.batch}",
            fix=f"--data.global_batch {stream.degree}",
            code="D027",
        )
    if position < 0:
        raise ShoalError(f"position must be at least 0, got {position}", fix="position=0", code="D028")
    share(stream.batch, stream.coordinate, stream.degree)  # raises for a coordinate outside of the degree
