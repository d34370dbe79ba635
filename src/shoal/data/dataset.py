"""The interface of a dataset: a number of samples, and any of them as one batch.

torch's `Dataset` returns single samples that a `collate_fn` must stack. Here one call returns a whole batch, which for
tokens is one gather instead of a Python loop. Any object with these members works.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from shoal.data.task import Task
from shoal.errors import ShoalError

Batch = dict[str, torch.Tensor]
Ids = npt.NDArray[np.int64]


class Dataset(Protocol):
    """Samples numbered from 0."""

    task: Task
    """The meaning of the labels."""

    vocabulary: int | None
    """The number of different token ids, or of classes of images; None: not known without reading everything."""

    num_classes: int | None
    """The number of classes that labels name; None: labels are tokens."""

    @property
    def tokens_per_sample(self) -> int | None:
        """None where a sample is not made of tokens."""

    @property
    def labels_per_sample(self) -> int | None:
        """The labels of every sample that count; None: they vary, and are counted in every batch."""

    @property
    def is_in_memory(self) -> bool:
        """Whether a batch is made without reading a file, which may take long."""

    def __len__(self) -> int: ...

    def batch(self, ids: Ids) -> Batch:
        """These samples, in this order, stacked along dim 0."""

    def describe(self) -> str:
        """One line about its origin and size; of a mixture, one for each of its sources."""

    def digest(self) -> str:
        """A hash of the samples; empty: the settings decide all samples."""


class Part:
    """A range of consecutive samples of another dataset."""

    def __init__(self, whole: Dataset, start: int, stop: int, description: str) -> None:
        self.whole, self.start, self.stop = whole, start, stop
        self.tokens_per_sample = whole.tokens_per_sample
        self.labels_per_sample = whole.labels_per_sample
        self.is_in_memory = whole.is_in_memory
        self.vocabulary = whole.vocabulary
        self.task = whole.task
        self.num_classes = whole.num_classes
        self._description = description

    def __len__(self) -> int:
        return self.stop - self.start

    def batch(self, ids: Ids) -> Batch:
        """These samples, counted from the start of the part."""
        return self.whole.batch(ids + self.start)

    def describe(self) -> str:
        """Its description, and its size."""
        return f"{self._description}; {len(self):,} samples"

    def digest(self) -> str:
        """The digest of the whole; a fingerprint has the size of the part."""
        return self.whole.digest()


def num_held_out(num_samples: int, fraction: float) -> int:
    """The number of held-out samples: none if the fraction is 0, else at least one.

    >>> num_held_out(1000, 0.01), num_held_out(7, 0.01), num_held_out(7, 0.0)
    (10, 1, 0)
    """
    return max(1, round(fraction * num_samples)) if fraction > 0 else 0


def split_last(whole: Dataset, fraction: float, description: str) -> tuple[Part, Part]:
    """Split off the last samples for evaluation."""
    cut = len(whole) - num_held_out(len(whole), fraction)
    if cut < 1:
        raise ShoalError(
            f"holding out {fraction:g} of {len(whole)} samples leaves none to train on ({description})",
            fix="--data.validation 0, or more samples",
            code="D025",
        )
    return Part(whole, 0, cut, description), Part(whole, cut, len(whole), f"held out of {description}")
