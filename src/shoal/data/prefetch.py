"""Prepare batches ahead of use by a thread or by worker processes, or make them on demand.

A thread starts at once and passes batches without a copy, which is enough for tokens. Processes have their own
interpreter lock and use more cores, which suits expensive batches, such as images to decode. A batch of a few tokens is
faster made on demand: on a CPU, a thread competes with the step for the interpreter lock.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch.utils.data import DataLoader

from shoal.data.dataset import Batch
from shoal.errors import RunFailed, ShoalError

SECONDS_TO_STOP = 2.0
"""Seconds that a stopped thread has to finish its batch."""


class Batches(Protocol):
    """Batches by position."""

    def __getitem__(self, position: int) -> Batch: ...


class Prefetch(Protocol):
    """A stoppable producer of batches."""

    def take(self) -> Batch:
        """Return the next batch, or raise the error of its producer."""

    def stop(self) -> None:
        """End threads and processes; a second call does nothing."""


class Inline:
    """Make batches on demand."""

    def __init__(self, batches: Batches, positions: Iterable[int]) -> None:
        self._batches, self._positions = batches, iter(positions)

    def take(self) -> Batch:
        """Make the next batch."""
        return self._batches[next(self._positions)]

    def stop(self) -> None:
        """Do nothing: there is no thread."""


class Thread:
    """One thread that prepares at most `prefetch` batches."""

    def __init__(
        self, batches: Batches, positions: Iterable[int], *, prefetch: int, pin: bool, timeout: float | None = None
    ) -> None:
        self._timeout = timeout
        self._ready: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(prefetch)
        self._stopping = threading.Event()
        work = (batches, positions, pin, self._ready, self._room, self._stopping)
        self._thread = threading.Thread(target=_fill, args=work, name="shoal-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> Batch:
        """Wait for a batch, and let the thread prepare another."""
        try:
            made = self._ready.get(timeout=self._timeout)
        except queue.Empty:
            raise _not_ready(self._timeout) from None
        if isinstance(made, BaseException):
            raise made  # its traceback shows the thread
        self._room.release()
        return made

    def stop(self) -> None:
        """Wake the thread and wait up to two seconds for the end of its batch. It is a daemon."""
        self._stopping.set()
        self._room.release()
        if self._thread is not threading.current_thread():  # garbage collection may happen on any thread
            self._thread.join(SECONDS_TO_STOP)


def _fill(
    batches: Batches,
    positions: Iterable[int],
    pin: bool,
    ready: queue.SimpleQueue[Batch | BaseException],
    room: threading.Semaphore,
    stopping: threading.Event,
) -> None:
    """The body of the thread. It has no reference to the Loader, so that an unused Loader can be collected."""
    try:
        for position in positions:
            room.acquire()
            if stopping.is_set():
                return
            batch = batches[position]
            ready.put({key: value.pin_memory() for key, value in batch.items()} if pin else batch)
    except BaseException as error:  # the consumer would wait without end
        ready.put(error)


def _ignore_signals(worker: int) -> None:
    """Ignore stop signals. A scheduler signals all processes, but the training process decides when to stop."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class _Answers:
    """Batches of a worker process. A `ShoalError` is returned as a value.

    torch would rebuild a raised one from its text and a traceback, without its fix and its exit code.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, position: int) -> Batch | ShoalError:
        try:
            return self._batches[position]
        except ShoalError as error:
            return error


def _not_ready(seconds: float | None) -> RunFailed:
    return RunFailed(
        f"the next batch was not ready within {seconds:g} s",
        fix=f"--launch.timeout {2 * (seconds or 0):g}, or a faster data source",
        code="D029",
    )


class Processes:
    """Worker processes of torch's `DataLoader` with positions as its sampler; a worker makes whole batches."""

    def __init__(
        self,
        batches: Batches,
        positions: range,
        *,
        workers: int,
        prefetch: int,
        pin: bool,
        timeout: float | None = None,
    ) -> None:
        self._timeout = timeout
        fork = "fork" in multiprocessing.get_all_start_methods()  # then workers share the dataset instead of copying it
        loader: DataLoader[Batch | ShoalError] = DataLoader(
            _Answers(batches),  # type: ignore[arg-type]  # a map from index to sample is enough
            sampler=positions,
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch,
            pin_memory=pin,
            timeout=timeout or 0,  # 0: none
            multiprocessing_context="fork" if fork else None,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # else it draws from the global one, and the model's randomness changes
        )
        with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads; workers use none of them
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            before = set(multiprocessing.active_children())
            self._iterator: Iterator[Batch | ShoalError] | None = iter(loader)
            self._workers = set(multiprocessing.active_children()) - before

    def take(self) -> Batch:
        """Return the next batch; an exception of a worker has that worker's traceback in its text."""
        assert self._iterator is not None
        made: Batch | Exception
        try:
            made = next(self._iterator)
        except Exception as error:
            made = error.with_traceback(None)  # its frames, all of them torch's, would keep the workers alive
        if isinstance(made, Exception):
            raise _not_ready(self._timeout) if str(made).startswith("DataLoader timed out") else made
        return made

    def stop(self) -> None:
        """Drop the iterator, which is the public way to end its processes; kill those that remain."""
        self._iterator = None
        for worker in self._workers:
            if worker.is_alive():  # it is in the middle of a batch, and ignores SIGTERM
                worker.kill()
                worker.join(SECONDS_TO_STOP)
        self._workers = set()
