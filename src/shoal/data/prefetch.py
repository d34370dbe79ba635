"""Making batches ahead of their use, by one thread or by worker processes; or when they are asked for. All make a batch
by its position.

A thread starts at once and hands batches over without a copy, which is enough for tokens. Processes have their own
interpreter lock and can use more cores, which is for batches that are work to make, such as images to be decoded. A
batch of a few tokens is sooner made than handed over: beside a step on a CPU, the thread takes the interpreter's lock
from it.
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
    """Any batch by its position."""

    def __getitem__(self, position: int) -> Batch: ...


class Prefetch(Protocol):
    """Something that prepares batches and can be stopped."""

    def take(self) -> Batch:
        """The next batch, or what went wrong while it was made."""

    def stop(self) -> None:
        """End threads and processes; a second time does nothing."""


class Inline:
    """Nothing is made ahead."""

    def __init__(self, batches: Batches, positions: Iterable[int]) -> None:
        self._batches, self._positions = batches, iter(positions)

    def take(self) -> Batch:
        """Make a batch."""
        return self._batches[next(self._positions)]

    def stop(self) -> None:
        """Nothing runs."""


class Thread:
    """One thread that keeps at most `prefetch` batches ready."""

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
        """Wait for a batch and make room for another."""
        try:
            made = self._ready.get(timeout=self._timeout)
        except queue.Empty:
            raise _not_ready(self._timeout) from None
        if isinstance(made, BaseException):
            raise made  # its traceback still shows where in the thread it was raised
        self._room.release()
        return made

    def stop(self) -> None:
        """Wake the thread up and wait until it has gone, which takes as long as the batch that it is making; but not
        for ever. It is a daemon, and ends with the process."""
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
    """The thread. It knows no Loader, so that a forgotten Loader can be collected while it runs."""
    try:
        for position in positions:
            room.acquire()
            if stopping.is_set():
                return
            batch = batches[position]
            ready.put({key: value.pin_memory() for key, value in batch.items()} if pin else batch)
    except BaseException as error:  # whatever it is, the consumer must hear of it and not wait for ever
        ready.put(error)


def _ignore_signals(worker: int) -> None:
    """A scheduler that asks a run to end asks all of its processes. The training process decides when; until then it
    needs its batches."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class _Answers:
    """Batches of a worker process. A `ShoalError` is an answer too: torch would rebuild it from its text and a
    traceback, without its fix and its exit code."""

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
        fix="look at what the dataset waits for; or a longer --launch.timeout",
    )


class Processes:
    """Worker processes of torch's `DataLoader`, whose sampler is our positions; a worker makes whole batches."""

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
            _Answers(batches),  # type: ignore[arg-type]  # a map from index to sample is all that is asked of it
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
        with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads; workers touch neither
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            before = set(multiprocessing.active_children())
            self._iterator: Iterator[Batch | ShoalError] | None = iter(loader)
            self._workers = set(multiprocessing.active_children()) - before

    def take(self) -> Batch:
        """The next batch; an exception of a worker carries that worker's traceback in its text."""
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
        """Let go of the iterator, which is the public way to end its processes; kill those that are still there."""
        self._iterator = None
        for worker in self._workers:
            if worker.is_alive():  # it is in the middle of a batch, and ignores SIGTERM
                worker.kill()
                worker.join(SECONDS_TO_STOP)
        self._workers = set()
