"""A mixture of datasets by weight. Its order is a pure function of the seed and the position, as that of one dataset.

    position ──▶ source, draw (interleave.py) ──▶ sample of the source: position `draw` of its own shuffled order

Each source is walked through in its own order, so each of its samples occurs once per pass of that source. A pass of a
small source with a large weight ends earlier than that of others, and its next pass has another order.

An epoch of a mixture has as many samples as all sources together. `describe` says how often each source is passed in
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shoal.data.dataset import Batch, Dataset, Ids
from shoal.data.interleave import drawn
from shoal.data.order import stream_ids
from shoal.data.sources.digest import hashed
from shoal.hash_rng import hashed_number

_SHUFFLE_BATCH, _SOURCE = 1, 2  # purposes of a hash


class Union:
    """The samples of several datasets, one after the other."""

    def __init__(self, members: Sequence[Dataset]) -> None:
        self.members = list(members)
        self._ends = np.cumsum([len(member) for member in members], dtype=np.int64)
        self.tokens_per_sample = members[0].tokens_per_sample
        labels = {member.labels_per_sample for member in members}
        self.labels_per_sample = labels.pop() if len(labels) == 1 else None
        self.is_in_memory = all(member.is_in_memory for member in members)
        self.task = members[0].task
        self.num_classes = members[0].num_classes  # all have the same classes
        known = [member.vocabulary for member in members]
        self.vocabulary = None if None in known else max(size for size in known if size is not None)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, ids: Ids) -> Batch:
        """Each member makes its own samples; they are put into their rows."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self):
            raise IndexError(f"samples {ids.min()} to {ids.max()} of a dataset of {len(self)}")
        which = np.searchsorted(self._ends, ids, side="right")
        batch: dict[str, np.ndarray[Any, Any]] = {}
        for number in np.unique(which):
            rows = np.flatnonzero(which == number)
            part: Batch = self.members[number].batch(ids[rows] - self._start(number))
            if len(rows) == len(ids):
                return part
            for key, tensor in part.items():
                array = tensor.numpy()  # torch's own indexed copy starts threads, which costs more than the copy
                if key not in batch:
                    batch[key] = np.empty((len(ids), *array.shape[1:]), dtype=array.dtype)
                batch[key][rows] = array
        return {key: torch.from_numpy(array) for key, array in batch.items()}

    def describe(self) -> str:
        """All members."""
        return "; ".join(member.describe() for member in self.members)

    def digest(self) -> str:
        """The digest of all members, in their order, and of their sizes."""
        return hashed(f"{len(member)} {member.digest()}".encode() for member in self.members)

    def _start(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0


class Mixture(Union):
    """Datasets that are drawn from by weight: `counts` samples of each in every `sum(counts)` samples."""

    def __init__(self, members: Sequence[Dataset], counts: Sequence[int]) -> None:
        super().__init__(members)
        self.counts = tuple(counts)

    def ids_at(self, seed: int, positions: Ids) -> Ids:
        """The samples at these positions of the run's stream."""
        which, draws = drawn(self.counts, positions)
        ids = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(which):
            rows = which == number
            own = draws[rows]
            first, last = int(own.min()), int(own.max())  # near each other, since the positions are of one batch
            key, size = hashed_number(seed, _SOURCE, int(number)), len(self.members[number])
            ids[rows] = stream_ids(key, size, first, last - first + 1)[own - first] + self._start(number)
        return ids

    def describe(self) -> str:
        """A line for each member, with its share and its passes in an epoch."""
        total, lines = sum(self.counts), [f"a mixture, {len(self):,} samples per epoch"]
        for member, count in zip(self.members, self.counts, strict=True):
            passes = count / total * len(self) / len(member)
            lines.append(f"{count / total:.2%} of {member.describe()}, {passes:.3g} passes per epoch")
        return "\n       ".join(lines)  # below the word `data` of a run's first lines

    def digest(self) -> str:
        """The digest of all members and their shares."""
        return hashed([str(self.counts).encode(), super().digest().encode()])


def batch_ids(dataset: Dataset, seed: int, position: int, batch: int, part: slice) -> Ids:
    """The samples of a part of the global batch that starts at `position`.

    A mixture shuffles each batch. Else a rank could have the same source in every step: with weights 1 and 1 and two
    samples per batch, rank 0 would never see the second source.
    """
    count = part.stop - part.start
    if not isinstance(dataset, Mixture):
        return stream_ids(seed, len(dataset), position + part.start, count)
    start = position // batch * batch  # each batch has an epoch of its own in a stream of `batch` places
    places = stream_ids(hashed_number(seed, _SHUFFLE_BATCH), batch, start + part.start, count)
    return dataset.ids_at(seed, position + places)
