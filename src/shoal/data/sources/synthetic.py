"""Synthetic samples that a model can learn. Each is computed from its id, so nothing is stored and any size is free.

Random tokens would test speed only: their loss cannot fall. These follow a rule that depends on the seed. So a falling
loss proves that training works, and its lowest value is known beforehand.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from shoal.data.dataset import Batch, Ids
from shoal.data.order import sample_ids
from shoal.data.task import Task
from shoal.hash_rng import hashed, unit_interval

NOISE = 0.1
"""The fraction of the tokens that do not follow from the one before."""

_START, _JUMP, _LABEL, _WINDOW, _PATTERN, _POOL = range(6)  # purposes of a hash, so that no two share numbers


class SyntheticTokens:
    """Samples from a noisy walk around a ring of all tokens, in an order keyed by the seed.

    Nine times in ten the next token is the next in the ring, else the sample jumps to a random place.

        ring   7 → 2 → 5 → 0 → ... → 7          sample   2 5 0 │ 9 1 │ 5 0 ...
    """

    task: Task = "next token"
    num_classes: int | None = None

    def __init__(self, *, seed: int, num_samples: int, sequence: int, vocabulary: int, documents: bool = False) -> None:
        self.tokens_per_sample = self.labels_per_sample = sequence
        self.is_in_memory = True
        self.vocabulary: int | None = vocabulary
        self._seed, self._num_samples, self._documents = seed, num_samples, documents
        self._ring = sample_ids(seed, vocabulary, 0, vocabulary)

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, ids: Ids) -> Batch:
        """`tokens` and `labels` (B, T)."""
        places = np.arange(self.tokens_per_sample + 1)
        jumps = unit_interval(hashed(self._seed, _JUMP, ids[:, None], places)) < NOISE
        jumps[:, 0] = True
        last_jump = np.maximum.accumulate(np.where(jumps, places, 0), axis=1)
        landed = hashed(self._seed, _START, ids[:, None], last_jump) % np.uint64(len(self._ring))
        stream = self._ring[(landed.astype(np.int64) + places - last_jump) % len(self._ring)]
        parts = {"tokens": stream[:, :-1], "labels": stream[:, 1:]}
        batch = {key: torch.from_numpy(np.ascontiguousarray(part)) for key, part in parts.items()}
        if self._documents:
            batch["documents"] = torch.zeros_like(batch["tokens"], dtype=torch.int32)
        return batch

    @property
    def best_loss(self) -> float:
        """The entropy of the rule in nats per token: no model can have a lower loss."""
        vocabulary = len(self._ring)
        other = NOISE / vocabulary
        follows = 1 - NOISE + other
        return -follows * math.log(follows) - (vocabulary - 1) * other * math.log(other)

    def describe(self) -> str:
        """The rule, its size, and its lowest possible loss."""
        return (
            f"synthetic tokens from a noisy rule over {self.vocabulary} tokens, {self.tokens_per_sample:,} per sample,"
            f" lowest possible loss {self.best_loss:.3f}"
        )

    def digest(self) -> str:
        """Empty: the settings and the seed decide every sample."""
        return ""


class SyntheticImages:
    """Every class has a coarse pattern, and every image is its class's pattern plus noise of the same size."""

    task: Task = "image class"
    tokens_per_sample = None
    labels_per_sample = 1
    is_in_memory = True

    def __init__(self, *, seed: int, num_samples: int, size: int, classes: int) -> None:
        self.vocabulary: int | None = classes
        self.num_classes: int | None = classes
        self._seed, self._num_samples, self._size = seed, num_samples, size
        self._patterns = _normal(seed, _PATTERN, classes * 3 * 4 * 4).reshape(classes, 3, 4, 4)
        self._pool = _normal(seed, _POOL, 3 * size * size + 2**16)  # an image's noise is a window into it

    def __len__(self) -> int:
        return self._num_samples

    def batch(self, ids: Ids) -> Batch:
        """`images` (B, 3, S, S) and `labels` (B)."""
        labels = (hashed(self._seed, _LABEL, ids) % np.uint64(len(self._patterns))).astype(np.int64)
        windows = (hashed(self._seed, _WINDOW, ids) % np.uint64(2**16)).astype(np.int64)
        size = self._size
        coarse = np.arange(size) * 4 // size  # which cell of the 4 × 4 pattern a pixel is in
        images = sliding_window_view(self._pool, 3 * size * size)[windows].reshape(-1, 3, size, size)
        images += self._patterns[labels][:, :, coarse[:, None], coarse]
        return {"images": torch.from_numpy(images), "labels": torch.from_numpy(labels)}

    def describe(self) -> str:
        """Classes and size."""
        return f"synthetic images of {self.vocabulary} classes, {self._size} x {self._size}"

    def digest(self) -> str:
        """Empty: the settings and the seed decide every sample."""
        return ""


def _normal(seed: int, purpose: int, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    key = hashed(seed, purpose).tolist()
    return np.random.Generator(np.random.PCG64(key)).standard_normal(count, dtype=np.float32)
