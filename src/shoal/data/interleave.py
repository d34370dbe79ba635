"""Interleave sources by weight: which source each position of a mixture is drawn from, as a pure function.

A random draw per position has the right proportions only in the long run: 0.1 of 1,000 samples are 100 ± 9. Here the
count of every source differs from its share by less than one sample, after any number of samples:

    weights 0.5, 0.3, 0.2      counts 5, 3, 2 of a period of 10
    position    0   1   2   3   4   5   6   7   8   9 │ 10  11 ...
    source      0   1   0   2   0   1   0   1   0   2 │  0   1 ...      the period repeats
    draw        0   0   1   0   2   1   3   2   4   1 │  5   3 ...      the number of earlier draws of this source

Draw k of a source with c draws in a period of P positions has a window: [floor(k P / c), ceil((k + 1) P / c)). If each
draw is inside its window, each count is within one of its share at every position. Such an order always exists
(R. Tijdeman, The chairman assignment problem, 1980), and the draw whose window ends first finds it.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

LONGEST_PERIOD = 100_000
"""Positions of a period: the table takes 0.1 s to compute. Weights that need a longer one are rounded to it."""
MOST_ROUNDING = 0.01
"""The largest change of a weight by rounding, as a fraction of it."""


def counts_of(weights: Sequence[float]) -> tuple[int, ...] | None:
    """The draws of each source in a period. None: a weight is too small to be rounded well.

    Weights mean the decimal numbers that were typed: 0.1 is a tenth.

    >>> counts_of([0.7, 0.3]), counts_of([2, 6]), counts_of([1, 1e-9])
    ((7, 3), (1, 3), None)
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    common = math.gcd(*whole)
    counts = [number // common for number in whole]
    if sum(counts) <= LONGEST_PERIOD:
        return tuple(counts)
    total = sum(counts)
    rounded = [round(Fraction(number * LONGEST_PERIOD, total)) for number in counts]
    pairs = zip(rounded, counts, strict=True)
    shares = [(Fraction(number, sum(rounded)), Fraction(count, total)) for number, count in pairs]
    if any(abs(now - before) > MOST_ROUNDING * before for now, before in shares):
        return None
    common = math.gcd(*rounded)
    return tuple(number // common for number in rounded)


@functools.lru_cache(maxsize=4)
def period(counts: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each position of a period: its source, and the number of earlier draws of this source in the period.

    >>> [row.tolist() for row in period((5, 3, 2))]
    [[0, 1, 0, 2, 0, 1, 0, 1, 0, 2], [0, 0, 1, 0, 2, 1, 3, 2, 4, 1]]
    """
    length = sum(counts)
    sources, draws = np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64)
    windows = sorted(
        (draw * length // count, -(-(draw + 1) * length // count), source, draw)
        for source, count in enumerate(counts)
        for draw in range(count)
    )
    started, opened = 0, list[tuple[int, int, int]]()
    for position in range(length):
        while started < length and windows[started][0] <= position:
            heapq.heappush(opened, windows[started][1:])
            started += 1
        end, sources[position], draws[position] = heapq.heappop(opened)
        assert position < end, f"the draws {counts} cannot be interleaved"
    for table in (sources, draws):
        table.flags.writeable = False  # callers share it
    return sources, draws


def drawn(
    counts: tuple[int, ...], positions: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The source of each position of the endless stream, and the number of earlier draws of this source."""
    sources, draws = period(counts)
    periods, offsets = np.divmod(positions, len(sources))
    which = sources[offsets]
    return which, periods * np.array(counts, dtype=np.int64)[which] + draws[offsets]
