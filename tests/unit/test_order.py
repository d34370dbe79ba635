"""The sample order is a bijection per epoch, looks random, and does not know how many ranks there are."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data import order
from shoal.data.order import sample_ids, share, stream_ids
from tests.rejects import rejects

seeds = st.integers(-(2**63), 2**64)
sizes = st.integers(1, 400)


def test_drawing_in_the_docstring_is_true() -> None:
    row = next(line for line in str(order.__doc__).splitlines() if line.strip().startswith("sample  "))
    assert sample_ids(0, 5, 0, 12).tolist() == [int(word) for word in row.split()[1:]]


@given(seed=seeds, size=sizes, epoch=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_sample_once_per_epoch(seed: int, size: int, epoch: int) -> None:
    assert sorted(sample_ids(seed, size, epoch * size, size).tolist()) == list(range(size))


@given(seed=seeds, size=sizes, start=st.integers(0, 2000), counts=st.lists(st.integers(0, 300), max_size=5))
@settings(max_examples=60, deadline=None)
def test_any_range_is_a_piece_of_one_stream(seed: int, size: int, start: int, counts: list[int]) -> None:
    whole = sample_ids(seed, size, 0, start + sum(counts))
    for count in counts:
        np.testing.assert_array_equal(sample_ids(seed, size, start, count), whole[start : start + count])
        start += count


@pytest.mark.parametrize("size", [2**20 - 1, 2**31 + 1, 2**40])
def test_large_sizes_stay_in_range_and_repeat_nothing(size: int) -> None:
    drawn = np.concatenate([sample_ids(1, size, 0, 5000), sample_ids(1, size, size - 5000, 5000)])
    assert len(np.unique(drawn)) == 10_000
    assert drawn.min() >= 0
    assert size // 2 < drawn.max() < size


def test_epochs_and_seeds_differ() -> None:
    orders = [tuple(sample_ids(seed, 100, epoch * 100, 100)) for seed in (-1, 0, 1, 2**40) for epoch in range(5)]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("size", [2, 3, 7, 10, 64])
def test_first_position_is_uniform_over_seeds(size: int) -> None:
    draws = 40 * size
    counts = Counter(int(sample_ids(seed, size, 0, 1)[0]) for seed in range(draws))
    assert _chi_square([counts[value] for value in range(size)], draws / size) < _chi_square_limit(size - 1)


@pytest.mark.parametrize("size", [3, 4])
def test_all_orders_of_a_few_samples_are_equally_likely(size: int) -> None:
    draws = 100 * math.factorial(size)
    counts = Counter(tuple(sample_ids(seed, size, 0, size).tolist()) for seed in range(draws))
    assert len(counts) == math.factorial(size)
    assert _chi_square(counts.values(), 100) < _chi_square_limit(math.factorial(size) - 1)


@pytest.mark.parametrize("size", [1000, 4096, 10_007])
def test_neither_position_nor_neighbour_tells_the_value(size: int) -> None:
    limit = 4.5 / math.sqrt(size)  # a correlation of random pairs has deviation 1/sqrt(size)
    for seed in range(5):
        values = sample_ids(seed, size, 0, size)
        following = sample_ids(seed, size, size, size)
        assert abs(np.corrcoef(np.arange(size), values)[0, 1]) < limit
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < limit
        assert abs(np.corrcoef(values, following)[0, 1]) < limit
        steps = np.bincount(np.diff(values) % 16, minlength=16)
        assert _chi_square(steps, steps.sum() / 16) < _chi_square_limit(15)


@given(batch=st.integers(0, 200), degree=st.integers(1, 40))
def test_shares_partition_the_batch(batch: int, degree: int) -> None:
    shares = [share(batch, coordinate, degree) for coordinate in range(degree)]
    assert [index for part in shares for index in range(part.start, part.stop)] == list(range(batch))
    lengths = [part.stop - part.start for part in shares]
    assert max(lengths) - min(lengths) <= 1


@given(seed=seeds, size=sizes, batch=st.integers(1, 64), start=st.integers(0, 1000), degree=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_union_over_ranks_does_not_depend_on_their_number(
    seed: int, size: int, batch: int, start: int, degree: int
) -> None:
    parts = [share(batch, coordinate, degree) for coordinate in range(degree)]
    union = np.concatenate([sample_ids(seed, size, start + part.start, part.stop - part.start) for part in parts])
    np.testing.assert_array_equal(union, sample_ids(seed, size, start, batch))


@pytest.mark.alone
def test_is_fast() -> None:
    sample_ids(0, 10**9, 0, 4096)
    fastest = min(_seconds_for_4096(start) for start in range(20))
    assert fastest < 0.002


def test_invalid_arguments_are_rejected() -> None:
    with rejects("D028", "size=0"):
        sample_ids(0, 0, 0, 1)
    with rejects("D028", "from 0", "to 3", "got 4"):
        share(8, 4, 4)


def test_needs_no_torch() -> None:
    code = "import sys, shoal.data.order; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def _seconds_for_4096(start: int) -> float:
    began = time.perf_counter()
    sample_ids(0, 10**9, start * 4096, 4096)
    return time.perf_counter() - began


def _chi_square(counts: object, expected: float) -> float:
    return float(sum((count - expected) ** 2 / expected for count in counts))  # type: ignore[attr-defined]


def _chi_square_limit(freedom: int) -> float:
    """Mean plus five deviations: random numbers go beyond it about once in ten thousand times."""
    return freedom + 5 * math.sqrt(2 * freedom)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 5), size=st.integers(1, 9000), start=st.integers(0, 20_000), count=st.integers(0, 9000))
def test_a_reader_of_the_stream_gets_the_same_order(seed: int, size: int, start: int, count: int) -> None:
    assert stream_ids(seed, size, start, count).tolist() == sample_ids(seed, size, start, count).tolist()
