"""Samples of examples: each padded to the length of a sample, or several packed into one.

    pack off   [q q a a a . . .]    one example; `.` is padding, after which nothing counts. Attention is causal, so no
                                    token of the example sees it
    pack on    [q q a a a q a a]    documents 0 0 0 0 0 1 1 1: no example sees another
    labels     [_ a a a _ a a _]    the next token where that is an answer's; `_` is IGNORE

Examples are packed in their order, so that a sample depends on the files and the settings alone. One that is longer
than a sample is cut at its end, and left out if no answer remains: it would train nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from shoal.data.batch import IGNORE
from shoal.data.dataset import Batch, Ids
from shoal.data.sources.chat.encode import Example
from shoal.data.sources.digest import digest_of_streams
from shoal.data.task import Task
from shoal.errors import ShoalError


class Examples:
    """A dataset of conversations. A batch has `tokens`, `labels`, and with `pack` also `documents` (all B, T)."""

    task: Task = "next token"
    num_classes: int | None = None
    labels_per_sample = None
    is_in_memory = True

    def __init__(
        self,
        examples: Iterable[Example],
        *,
        sequence: int,
        vocabulary: int,
        end_token: int,
        pack: bool,
        origin: str,
        has_conversations: bool,
    ) -> None:
        """`has_conversations`: some examples are; others are plain text."""
        self.has_conversations = has_conversations
        self.tokens_per_sample = sequence
        self.vocabulary: int | None = vocabulary
        self._end_token, self._pack, self._origin = end_token, pack, origin
        every = list(examples)
        if not every:
            raise ShoalError(f"{origin} must have at least one row, got none", fix="--data.source PATH", code="D007")
        self._num_cut = sum(len(one.tokens) > sequence for one in every)
        cut = [Example(one.tokens[:sequence], one.is_trained[:sequence]) for one in every]
        self._examples = [one for one in cut if one.is_trained[1:].any()]
        self._num_left_out = len(cut) - len(self._examples)
        if not self._examples:
            raise ShoalError(
                f"every answer in {origin} begins after the first {sequence} tokens, and would be cut off",
                fix=f"--data.seq_len {max(len(one.tokens) for one in every)}",
                code="D074",
            )
        lengths = [len(one.tokens) for one in self._examples]
        self._samples = packed(lengths, sequence) if pack else [[number] for number in range(len(lengths))]

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, ids: Ids) -> Batch:
        """Lay the examples of each sample side by side."""
        shape = (len(ids), self.tokens_per_sample)
        tokens = np.full(shape, self._end_token, dtype=np.int64)
        labels = np.full(shape, IGNORE, dtype=np.int64)
        documents = np.zeros(shape, dtype=np.int32)
        for row, number in enumerate(ids):
            place = 0
            members = self._samples[number]
            for document, member in enumerate(members):
                one = self._examples[member]
                end = place + len(one.tokens)
                tokens[row, place:end] = one.tokens
                labels[row, place : end - 1] = np.where(one.is_trained[1:], one.tokens[1:].astype(np.int64), IGNORE)
                documents[row, place:end] = document
                place = end
            documents[row, place:] = len(members)  # padding
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        return {**batch, "documents": torch.from_numpy(documents)} if self._pack else batch

    def describe(self) -> str:
        """Origin, size, and how much of it is padding."""
        used = sum(len(one.tokens) for one in self._examples) / (len(self) * self.tokens_per_sample)
        cut = f", {self._num_cut:,} examples cut at {self.tokens_per_sample:,} tokens" if self._num_cut else ""
        cut += f", {self._num_left_out:,} without an answer left out" if self._num_left_out else ""
        how = "packed" if self._pack else "padded"
        return f"{self._origin}; {len(self):,} {how} samples of {self.tokens_per_sample:,} tokens, {used:.0%} used{cut}"

    def digest(self) -> str:
        """The digest of all tokens, and of which are trained."""
        return digest_of_streams([*(one.tokens for one in self._examples), *(one.is_trained for one in self._examples)])


def packed(lengths: Sequence[int], sequence: int) -> list[list[int]]:
    """Put examples, in their order, into samples that have room for them.

    >>> packed([3, 4, 2, 1], 7)
    [[0, 1], [2, 3]]
    """
    samples: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths):
        if length > room:
            samples.append([])
            room = sequence
        samples[-1].append(number)
        room -= length
    return samples
