"""Pack documents into one stream of tokens, cut into samples of equal length without padding.

    stream   t0 t1 t2 t3 │ t4 t5 t6 t7 │ t8 t9           sequence T = 4
    sample 0 [t0 t1 t2 t3] t4                            inputs are the first T of T + 1 tokens,
    sample 1              [t4 t5 t6 t7] t8               labels the last T: the shift is made only here [1]
                                           t9            fewer than T + 1 remain: not used [2]

Sample 0 with `documents`, where t1 is the end token (E) and `_` is IGNORE:

    tokens     t0  E   t2  t3
    documents   0  0    1   1        the end token belongs to the document that it ends [3]
    labels      E  _   t3  t4        no token is to predict the first one of another document [4]

[5] The end token inside a sample marks where a document ends; there is no table of offsets. So a memory-mapped file of
    any size is opened without being read, and each batch reads its own pages only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from shoal.data.batch import IGNORE
from shoal.data.dataset import Batch, Ids, num_held_out
from shoal.data.sources.digest import Tokens, digest_of_streams
from shoal.data.sources.memory_map import is_mapped, reject_shortened
from shoal.data.task import Task
from shoal.errors import ShoalError


class PackedTokens:
    """Samples of `sequence` tokens from one or more streams; no sample spans two streams.

    A batch has `tokens` and `labels` (both B, T, int64). With `documents` it also has `documents` (B, T, int32), the
    index of each token's document within the sample. A label that is the first token of another document is IGNORE. The
    end token belongs to the document that it ends.
    """

    task: Task = "next token"
    num_classes: int | None = None

    def __init__(
        self,
        streams: Sequence[Tokens],
        *,
        sequence: int,
        vocabulary: int | None,
        origin: str,
        end_token: int | None = None,
        documents: bool = False,
    ) -> None:
        self.tokens_per_sample = sequence
        self.labels_per_sample = None if documents else sequence
        self.vocabulary = vocabulary
        self._streams = list(streams)
        self.is_in_memory = not any(map(is_mapped, streams))
        self._ends = np.cumsum([num_samples(len(stream), sequence) for stream in streams], dtype=np.int64)
        self._origin = origin
        self._end_token = end_token
        self._documents = documents

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def batch(self, ids: Ids) -> Batch:
        """Gather the samples and shift the labels."""
        raw = self._gather(ids)
        inputs, labels = raw[:, :-1].astype(np.int64), raw[:, 1:].astype(np.int64)  # [1]
        batch = {"tokens": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        if self._documents:
            ends = inputs == self._end_token if self._end_token is not None else np.zeros(inputs.shape, dtype=bool)
            labels[ends] = IGNORE  # [4]
            ended_before = np.cumsum(ends, axis=1) - ends  # [3] without `- ends` it would begin the next one
            batch["documents"] = torch.from_numpy(ended_before.astype(np.int32))
        return batch

    def describe(self) -> str:
        """Origin, number of samples, and unused tokens."""
        holding = [len(stream) for stream in self._streams if num_samples(len(stream), self.tokens_per_sample)]
        used = len(self) * self.tokens_per_sample + len(holding)  # the last label of a stream is no sample's input
        left_over = sum(len(stream) for stream in self._streams) - used
        rest = f" ({left_over:,} tokens at the end not used)" if left_over else ""
        return f"{self._origin}; {len(self):,} samples of {self.tokens_per_sample:,} tokens{rest}"

    def digest(self) -> str:
        """The digest of the tokens. The settings decide how they are cut into samples."""
        return digest_of_streams(self._streams)

    def reject_shortened(self) -> None:
        """Raise if a file has lost tokens since it was opened."""
        for stream in self._streams:
            reject_shortened(stream)

    def _gather(self, ids: Ids) -> Tokens:
        """B × (T + 1) tokens, by one copy per stream of the batch, without a loop over samples."""
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(self):
            raise IndexError(f"samples {ids.min()} to {ids.max()} of a dataset of {len(self)}")
        which = np.searchsorted(self._ends, ids, side="right")
        gathered = np.empty((len(ids), self.tokens_per_sample + 1), dtype=np.result_type(np.uint8, *self._streams))
        for number in np.unique(which):
            reject_shortened(self._streams[number])
            rows = which == number
            before = self._ends[number - 1] if number else 0
            # [5] a view: windows overlap by one token, and only the chosen ones are read
            windows = sliding_window_view(self._streams[number], self.tokens_per_sample + 1)[:: self.tokens_per_sample]
            gathered[rows] = windows[ids[rows] - before]
        return gathered


def num_samples(num_tokens: int, sequence: int) -> int:
    """[2] The number of samples in a stream.

    >>> num_samples(10, 4), num_samples(9, 4), num_samples(8, 4)
    (2, 2, 1)
    """
    return max(0, num_tokens - 1) // sequence


def split_streams(streams: Sequence[Tokens], sequence: int, fraction: float) -> tuple[list[Tokens], list[Tokens]]:
    """Split off the last `fraction` of the samples, so that both parts share no token.

    The number of samples decides the cut, which is mostly inside a document.
    """
    if not any(len(stream) for stream in streams):
        raise ShoalError(
            "the data must hold at least one token, got none", fix="--data.source PATH with text in it", code="D007"
        )
    remaining = num_held_out(sum(num_samples(len(stream), sequence) for stream in streams), fraction)
    training, held_out = list(streams), list[Tokens]()
    while remaining and training:
        stream = training.pop()
        holds = num_samples(len(stream), sequence)
        taken = min(remaining, holds)
        cut = 0 if taken == holds else len(stream) - (taken * sequence + 1)
        training += [stream[:cut]] if cut else []
        held_out.insert(0, stream[cut:])
        remaining -= taken
    if not any(num_samples(len(stream), sequence) for stream in training):
        raise _too_short(streams, sequence, fraction)
    return training, held_out


def _too_short(streams: Sequence[Tokens], sequence: int, fraction: float) -> ShoalError:
    longest = max(len(stream) for stream in streams)
    aim = "one sample for training and one held out" if fraction else "one sample"
    need = 2 * (sequence + 1) if fraction else sequence + 1
    fits = longest // 2 - 1 if fraction else longest - 1
    shorter = f"--data.seq_len {fits}" if 0 < fits < sequence else ""
    fixes = [shorter, "--data.validation 0" if fraction else "", "more data"]
    return ShoalError(
        f"{aim} of --data.seq_len {sequence:,} take{'s' if not fraction else ''} {need:,} tokens,"
        f" but the longest document stream has {longest:,} (--data.validation {fraction:g})",
        fix=" or ".join(filter(None, fixes)),
        code="D014",
    )
