"""A user's own `DataLoader`, dealt out over the ranks: `batch_size` is the global batch, each rank takes its share.

torch gives `DistributedSampler`, which pads the last batch with samples seen twice, wants `set_epoch` to be called, and
changes the global batch with the number of ranks. Here the global batches are those of one process: the same samples in
the same order on any number of ranks, each once per epoch.
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
from shoal.data.order import sample_ids, share
from shoal.errors import ShoalError
from shoal.hash_rng import hashed_number


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank computes of one global batch."""

    batch: Any
    counts: bool
    """False: there was no sample for this rank, and one of another's stands in."""
    offset: int
    """The place of its first sample in the global batch."""
    largest: int
    """Samples of the largest share of this batch."""
    is_for_all: bool
    """Whether every rank has a sample of it."""


class ShardedDataLoader:
    """One rank's share of every global batch of a loader; iterate once per epoch, each epoch is shuffled anew."""

    def __init__(self, loader: DataLoader[Any], *, seed: int, coordinate: int, degree: int) -> None:
        if isinstance(loader.sampler, DistributedSampler):
            raise ShoalError(
                "this DataLoader has a DistributedSampler: it is already dealt out over ranks",
                fix="pass the plain DataLoader(dataset, batch_size=GLOBAL, shuffle=True)",
            )
        self.loader, self.seed, self.coordinate, self.degree = loader, seed, coordinate, degree
        self.epoch = 0
        """The epoch that begins next; while one goes on, the one after it."""
        self._current: int | None = None
        self._taken = 0
        """Batches of the current epoch that were taken; without one, those that the next epoch leaves out."""
        self.needs_equal_steps: Callable[[], bool] = lambda: False
        """Whether ranks meet in every forward, so that one without a batch would keep the others waiting."""
        self.cut: Callable[[Any], Any] = lambda batch: batch
        """A rank's tokens of a batch, where sequences are divided over ranks."""
        self.is_iterated_directly = False
        """True inside of `for batch in loader`, where ranks may get different numbers of batches."""

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Every sample of this rank's once, for a validation of one's own. A training loop uses `Run.batches`."""
        self.is_iterated_directly = True
        try:
            for share in self.shares():
                if not share.is_for_all and self.needs_equal_steps():
                    raise ShoalError(
                        "the last batch has fewer samples than there are ranks, and under this plan all ranks have to"
                        " take part in every forward",
                        fix="run.evaluate(loader), or DataLoader(..., drop_last=True)",
                    )
                if share.counts:
                    yield self.cut(share.batch)
        finally:
            self.is_iterated_directly = False

    def own_batches(self) -> Iterator[Any]:
        """Every sample of this rank's once; ranks may get different numbers of batches."""
        return (share.batch for share in self.shares() if share.counts)

    def shares(self) -> Iterator[Share]:
        """This rank's share of every batch; as many on every rank, stand-ins among them."""
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
        """An epoch, and how many batches of it were taken. Set it to go on from there: the next epoch is that one, and
        leaves those out."""
        return (self.epoch if self._current is None else self._current, self._taken)

    @position.setter
    def position(self, place: tuple[int, int]) -> None:
        self.epoch, self._taken = place
        self._current = None

    @property
    def kind(self) -> dict[str, Any]:
        """What decides which samples are in which batch. A stream has no number of samples, and nothing is known of
        what a sample holds."""
        loader = self.loader
        is_stream = isinstance(loader.dataset, IterableDataset)
        samples = len(loader.dataset) if not is_stream else None  # type: ignore[arg-type]
        shuffled, in_order = isinstance(loader.sampler, RandomSampler), isinstance(loader.sampler, SequentialSampler)
        order = "shuffled" if shuffled else "as numbered" if in_order else "of its own"
        return {
            "batch_size": loader.batch_size,
            "samples": samples,
            "order": order,
            "drop_last": loader.drop_last,
        }

    def _by_index(self, epoch: int, first: int) -> Iterator[Share]:
        """Load only this rank's samples, from the batch `first` on."""
        torch.manual_seed(hashed_number(self.seed, epoch, self.coordinate))  # each rank augments in its own way
        size = len(self.loader.dataset)  # type: ignore[arg-type]
        shuffled = isinstance(self.loader.sampler, RandomSampler)
        order = sample_ids(self.seed, size, epoch * size, size) if shuffled else np.arange(size)
        batch_size = self.loader.batch_size
        assert batch_size is not None
        batches = [order[start : start + batch_size] for start in range(0, size, batch_size)][first : len(self.loader)]
        places = [share(len(batch), self.coordinate, self.degree) for batch in batches]
        mine = [batch[place] for batch, place in zip(batches, places, strict=True)]
        # A rank must take part in every step; where there is no sample for it, it computes one that counts for nothing.
        filled = [ids if len(ids) else batch[:1] for ids, batch in zip(mine, batches, strict=True)]
        for place, ids, batch in zip(places, batches, _with_batches(self.loader, filled), strict=True):
            yield self._share(batch, place, len(ids))

    def _by_slicing(self, epoch: int, first: int) -> Iterator[Share]:
        """Load everything, keep this rank's rows: for streams and for samplers of the user's own."""
        torch.manual_seed(hashed_number(self.seed, epoch))  # what draws, draws alike on every rank
        for batch in itertools.islice(self.loader, first, None):
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
    """Whether its order is ours to decide: every sample once, shuffled or not."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return False
    if isinstance(loader.sampler, RandomSampler):
        return not loader.sampler.replacement and loader.sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    return isinstance(loader.sampler, SequentialSampler)


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
