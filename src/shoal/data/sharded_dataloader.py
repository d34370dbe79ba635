"""Shard a user's own `DataLoader` over the ranks: `batch_size` is the global batch, and each rank takes its share.

torch's `DistributedSampler` pads the last batch with repeated samples, needs `set_epoch`, and changes the global batch
with the number of ranks. Here the global batches are those of one process: the same samples in the same order on any
number of ranks, each once per epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from shoal.data.batch import length, rows
from shoal.data.draws import drawing_at, drawn_at
from shoal.data.order import sample_ids, share
from shoal.errors import ShoalError
from shoal.hash_rng import hashed_number


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of one global batch."""

    batch: Any
    counts: bool
    """False: there was no sample for this rank, and another rank's sample stands in with weight 0."""
    offset: int
    """The index of its first sample in the global batch."""
    largest: int
    """Samples of the largest share of this batch."""
    is_for_all: bool
    """Whether every rank has a sample of it."""


class ShardedDataLoader:
    """One rank's share of every global batch of a loader. Iterate once per epoch; each epoch has its own order."""

    def __init__(self, loader: DataLoader[Any], *, seed: int, coordinate: int, degree: int) -> None:
        if isinstance(loader.sampler, DistributedSampler):
            raise ShoalError(
                "the DataLoader must have no DistributedSampler, since shoal shards it over the ranks",
                fix="DataLoader(dataset, batch_size=GLOBAL, shuffle=True)",
                code="D030",
            )
        self.loader, self.seed, self.coordinate, self.degree = loader, seed, coordinate, degree
        self.epoch = 0
        """The epoch that begins next; during an epoch, the one after it."""
        self._current: int | None = None
        self._taken = 0
        """Batches taken of the current epoch; outside of an epoch, batches that the next one skips."""
        self.needs_equal_steps: Callable[[], bool] = lambda: False
        """Whether ranks communicate in every forward, so that all of them need the same number of batches."""
        self.cut: Callable[[Any], Any] = lambda batch: batch
        """A rank's tokens of a batch, where sequences are divided over ranks."""
        self.is_iterated_directly = False
        """True inside `for batch in loader`, where ranks may get different numbers of batches."""

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Every sample of this rank once, for a user's own validation. A training loop uses `Run.batches`."""
        self.is_iterated_directly = True
        try:
            for share in self.shares():
                if not share.is_for_all and self.needs_equal_steps():
                    raise ShoalError(
                        "the last batch has fewer samples than ranks, but under this plan all ranks must take part in"
                        " every forward",
                        fix="run.evaluate(loader), or DataLoader(..., drop_last=True)",
                        code="D031",
                    )
                if share.counts:
                    yield self.cut(share.batch)
        finally:
            self.is_iterated_directly = False

    def own_batches(self) -> Iterator[Any]:
        """Every sample of this rank once; ranks may get different numbers of batches."""
        return (share.batch for share in self.shares() if share.counts)

    def shares(self) -> Iterator[Share]:
        """This rank's share of every batch, stand-ins included; every rank has as many."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        first, self._taken = (0, 0) if self._current is not None else (self._taken, self._taken)
        self._current = epoch
        shares = self._by_index(epoch, first) if _can_be_indexed(self.loader) else self._by_slicing(epoch, first)
        return self._counted(shares, epoch)

    def _counted(self, shares: Iterator[Share], epoch: int) -> Iterator[Share]:
        for one in shares:
            if self._current == epoch:
                self._taken += 1
            yield one
        if self._current == epoch:
            self._current, self._taken = None, 0

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the number of batches taken of it. Set it to resume there."""
        return (self.epoch if self._current is None else self._current, self._taken)

    @position.setter
    def position(self, place: tuple[int, int]) -> None:
        self.epoch, self._taken = place
        self._current = None

    @property
    def kind(self) -> dict[str, Any]:
        """The settings that decide the samples of each batch. A stream has no number of samples."""
        loader = self.loader
        is_stream = isinstance(loader.dataset, IterableDataset)
        samples = len(loader.dataset) if not is_stream else None  # type: ignore[arg-type]
        shuffled, in_order = type(loader.sampler) is RandomSampler, type(loader.sampler) is SequentialSampler
        order = "shuffled" if shuffled else "as numbered" if in_order else "of its own"
        return {
            "batch_size": loader.batch_size,
            "samples": samples,
            "order": order,
            "drop_last": loader.drop_last,
        }

    def _by_index(self, epoch: int, first: int) -> Iterator[Share]:
        """Load only this rank's samples, from batch `first` on."""
        torch.manual_seed(hashed_number(self.seed, epoch, self.coordinate))  # for what a loop of the script's draws
        size = len(self.loader.dataset)  # type: ignore[arg-type]
        shuffled = isinstance(self.loader.sampler, RandomSampler)
        order = sample_ids(self.seed, size, epoch * size, size) if shuffled else np.arange(size)
        batch_size = self.loader.batch_size
        assert batch_size is not None
        batches = [order[start : start + batch_size] for start in range(0, size, batch_size)][first : len(self.loader)]
        places = [share(len(batch), self.coordinate, self.degree) for batch in batches]
        mine = [batch[place] for batch, place in zip(batches, places, strict=True)]
        # A rank must take part in every step; without a sample of its own, it computes one with weight 0.
        filled = [ids if len(ids) else batch[:1] for ids, batch in zip(mine, batches, strict=True)]
        drawn_by = (self.seed, epoch, self.coordinate)  # augmentation differs between ranks that have other samples
        with drawing_at(*drawn_by):  # seeds for workers
            loaded = iter(_with_batches(self.loader, filled))
        for place, ids, batch in zip(places, batches, drawn_at(loaded, *drawn_by, first=first), strict=True):
            yield self._share(batch, place, len(ids))

    def _by_slicing(self, epoch: int, first: int) -> Iterator[Share]:
        """Load all samples and take this rank's rows, for streams and a user's own samplers."""
        torch.manual_seed(hashed_number(self.seed, epoch))
        with drawing_at(self.seed, epoch):  # seeds for workers
            loaded = iter(self.loader)
        for batch in itertools.islice(drawn_at(loaded, self.seed, epoch), first, None):  # the same on every rank
            place = share(length(batch), self.coordinate, self.degree)
            counts = place.stop > place.start
            mine = rows(batch, place.start, place.stop) if counts else rows(batch, 0, 1)
            yield self._share(mine, place, length(batch))

    def _share(self, batch: Any, place: slice, size: int) -> Share:
        return Share(
            batch,
            counts=place.stop > place.start,
            offset=place.start,
            largest=-(-size // self.degree),
            is_for_all=size >= self.degree,
        )


def _can_be_indexed(loader: DataLoader[Any]) -> bool:
    """Whether shoal may decide its order: every sample once, shuffled or not."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return False
    if type(loader.sampler) is RandomSampler:  # a subclass may have an order of its own
        return not loader.sampler.replacement and loader.sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return type(loader.sampler) is SequentialSampler


def _with_batches(loader: DataLoader[Any], batches: list[np.ndarray[Any, Any]]) -> DataLoader[Any]:
    """The same loader over other index lists."""
    return DataLoader(
        loader.dataset,
        batch_sampler=[ids.tolist() for ids in batches],
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
