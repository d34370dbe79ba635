"""Random numbers of a user's data: the same on all ranks that share samples, whatever else these ranks have drawn.

The stages of a pipeline draw other dropout masks, so their generators differ after a step. A collate function that then
masks tokens at random would give inputs to the first stage and other labels to the last one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from shoal.hash_rng import hashed_number

T = TypeVar("T")


@contextmanager
def drawing_at(*place: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and `random` by a place inside, and restore them afterwards."""
    before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    number = hashed_number(*place)
    torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def drawn_at(items: Iterator[T], *place: int, first: int = 0) -> Iterator[T]:
    """The items, each of which is made with the random numbers of the place and its own number, from `first` on."""
    for number in range(first, 2**63):
        with drawing_at(*place, number):
            item = next(items, _END)
        if item is _END:
            return
        yield item  # type: ignore[misc]


_END = object()
