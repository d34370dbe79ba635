"""The order of the samples as a pure function, so that no rank, worker or checkpoint has to store it.

torch's `DistributedSampler` stores a permutation of the whole dataset on every rank, pads the last batch with repeats,
and cuts the order by the number of ranks. Resumed on another number, it repeats some samples and skips others. Here the
samples of a run are one endless stream. Position k is in epoch `k // size`, and a keyed permutation of that epoch gives
the sample. So the position of a run in the data is one integer, on any number of ranks.

    seed 0, size 5, batch 4, 2 ranks
    epoch      ├──────── 0 ───────┤├──────── 1 ───────┤├── 2 ──    [1]
    position     0   1   2   3   4   5   6   7   8   9  10  11
    sample       1   2   0   4   3   1   3   0   4   2   0   3
    step       └───── 0 ─────┘ └───── 1 ─────┘ └───── 2 ─────┘      a step may span two epochs
    rank         0   0   1   1   0   0   1   1   0   0   1   1     [4]

[1] Each epoch has its own keys, hashed from the seed and its number.
[2] From position to sample: a Feistel network over a grid of `rows × columns >= size` cells. Add to the row a hash of
    the column, to the column a hash of the row, and so on. Each round is invertible, so all of them are a bijection of
    the cells. Nothing is stored, and one access costs as much among 10 samples as among 10**12.
[3] A value on one of the few cells beyond `size` passes again until it is below ("cycle walking"), so the result is a
    bijection of [0, size).
[4] A rank takes a contiguous part of each batch. Another number of ranks cuts the same batches elsewhere, so a run
    resumes on it without a repeated or a skipped sample.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

from shoal.errors import ShoalError
from shoal.hash_rng import U64, hashed, mix

_BLOCK = 4096
"""Positions that `stream_ids` computes at a time: about a millisecond of work."""
ROUNDS = 8  # 4 make a Feistel network pseudo-random in theory; 8 leave room for grids of a few cells


def sample_ids(seed: int, size: int, start: int, count: int) -> npt.NDArray[np.int64]:
    """The samples at positions start, start + 1, ..., start + count - 1 of the stream.

    Within an epoch every sample occurs exactly once; the range may begin and end anywhere.

    >>> sorted(sample_ids(seed=0, size=5, start=5, count=5).tolist())
    [0, 1, 2, 3, 4]
    """
    if size < 1 or start < 0 or count < 0:
        raise ShoalError(
            f"size must be at least 1, start and count at least 0, got size={size}, start={start}, count={count}",
            fix="size=1, start=0, count=1",
            code="D028",
        )
    positions = start + np.arange(count, dtype=np.int64)
    epochs, offsets = np.divmod(positions, size)
    first_epoch, last_epoch = start // size, (start + max(count, 1) - 1) // size
    keys = hashed(seed, np.arange(first_epoch, last_epoch + 1), np.arange(ROUNDS)[:, None])  # [1] rounds × epochs
    keys_of_each = keys[:, epochs - first_epoch]  # rounds × positions
    return _permuted(offsets.astype(np.uint64), keys_of_each, size).astype(np.int64)


def stream_ids(seed: int, size: int, start: int, count: int) -> npt.NDArray[np.int64]:
    """`sample_ids` for sequential reads: a block of positions is computed once and cached.

    One position costs as many numpy calls as thousands.
    """
    first, last = start // _BLOCK, (start + max(count, 1) - 1) // _BLOCK
    blocks = [_block(seed, size, number) for number in range(first, last + 1)]
    together = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    begin = start - first * _BLOCK
    return together[begin : begin + count]


@functools.lru_cache(maxsize=256)  # of 32 KiB; a mixture reads one for each source
def _block(seed: int, size: int, number: int) -> npt.NDArray[np.int64]:
    ids = sample_ids(seed, size, number * _BLOCK, _BLOCK)
    ids.flags.writeable = False  # callers share it
    return ids


def share(batch: int, coordinate: int, degree: int) -> slice:
    """[4] The part of a global batch of data coordinate `coordinate` of `degree`.

    Parts are contiguous and disjoint, cover the batch, and differ in size by at most one.

    >>> [share(10, coordinate, 4) for coordinate in range(4)]
    [slice(0, 2, None), slice(2, 5, None), slice(5, 7, None), slice(7, 10, None)]
    """
    if not 0 <= coordinate < degree:
        raise ShoalError(
            f"the data coordinate must be from 0 to {degree - 1}, got {coordinate}",
            fix=f"0 to {degree - 1}",
            code="D028",
        )
    return slice(batch * coordinate // degree, batch * (coordinate + 1) // degree)


def _permuted(values: U64, keys: U64, size: int) -> U64:
    columns = math.isqrt(size - 1) + 1  # nearly a square: the fewest cells beyond `size`
    rows = -(-size // columns)
    values = _feistel(values, keys, rows, columns)  # [2]
    # [3] This ends: a bijection that starts below `size` comes back below it.
    while (outside := np.flatnonzero(values >= size)).size:
        values[outside] = _feistel(values[outside], keys[:, outside], rows, columns)
    return values


def _feistel(values: U64, keys: U64, rows: int, columns: int) -> U64:
    row, column = np.divmod(values, np.uint64(columns))
    for number in range(0, ROUNDS, 2):
        row = (row + _bits(column, keys[number])) % np.uint64(rows)
        column = (column + _bits(row, keys[number + 1])) % np.uint64(columns)
    return row * np.uint64(columns) + column


def _bits(half: U64, key: U64) -> U64:
    """56 random bits: few enough that adding a row or a column cannot overflow, which would not be invertible."""
    return mix(half ^ key) >> np.uint64(8)
