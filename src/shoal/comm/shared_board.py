"""Exchange of a few numbers between the ranks of one machine through shared memory.

gloo wakes threads on every rank for every message. On machines whose cores all compute, that costs a small step more
than the message itself: 3 % of a step of 28 ms (measured, Intel Xeon, two ranks on two cores). Here a rank writes its
numbers into its row, and reads the other rows when it needs them, one backward later: they are written by then.

    row of a rank   [number of the exchange | values ... | check]      two rows per rank, used alternately:

    exchange n      writes row n % 2   ...   reads row n % 2 of all
    exchange n + 1  writes row (n + 1) % 2, while a slower rank may still read n

No rank writes row n % 2 again before all ranks have written n + 1, so no rank still reads n. A rank that did not need
the sums of n waits for them all the same before it writes n + 1. A processor may reorder writes. A row whose check does
not match its values is read again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.comm.group_lifetime import is_cut
from shoal.comm.profile.timer import enter, waiting
from shoal.errors import LostPeer

ON_EVERY_RANK = "or, in a script, run.save(...) and run.sum(...) on every rank, without `if run.is_main:`"
WIDTH = 16
MOST_VALUES = WIDTH - 2
_PAUSE = 5e-5
"""Seconds between two reads of a row that is not written yet."""


class Board:
    """The rows of all ranks, seen from one of them. The file is in a folder that no other user can open."""

    def __init__(self, path: Path, *, rank: int, size: int, timeout: float) -> None:
        self._rows: np.ndarray[Any, np.dtype[np.float64]] = np.memmap(path, np.float64, "r+", shape=(2, size, WIDTH))
        self._rank, self._size, self._timeout = rank, size, timeout
        self._exchange = int(self._rows[:, rank, 0].max())  # continue after an earlier world of this process
        self._keys: list[str | None] = [None, None]
        self.summed = self._exchange
        """The number of the last exchange that this rank has read."""

    @staticmethod
    def create(path: Path, size: int) -> None:
        """Create the file before any rank opens it. It is complete or absent: on a full disk, ranks send messages."""
        draft = path.with_suffix(".part")
        with contextlib.suppress(OSError):
            draft.write_bytes(bytes(2 * size * WIDTH * 8))  # not sparse: a disk that fills later would kill a writer
            draft.replace(path)

    def post(self, values: Sequence[float]) -> int:
        """Write this rank's numbers and return the exchange's number. Every rank posts as many, in the same order."""
        if self.summed < self._exchange:
            self.sum(self._exchange, 0)
        self._exchange += 1
        row = self._rows[self._exchange % 2, self._rank]
        row[1 : 1 + len(values)] = values
        row[-1] = _check(self._exchange, row)
        row[0] = self._exchange
        self._keys[self._exchange % 2] = enter("board")
        return self._exchange

    @property
    def posted(self) -> int:
        """The number of the last exchange to which this rank has contributed."""
        return self._exchange

    def sum(self, exchange: int, num_values: int) -> list[float]:
        """Sum over all ranks, in rank order, so that all have the same bits; wait for ranks that are late."""
        with waiting("world", self._keys[exchange % 2]):
            rows = [self._row(exchange, rank)[1 : 1 + num_values] for rank in range(self._size)]
        self.summed = exchange
        return np.sum(rows, axis=0).tolist()  # type: ignore[no-any-return]

    def _row(self, exchange: int, rank: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        deadline: float | None = None
        while True:
            row = np.array(self._rows[exchange % 2, rank])
            if row[0] == exchange and _check(exchange, row) == row[-1]:
                return row
            if is_cut():
                raise LostPeer(f"rank {rank} did not write its numbers before the connections were cut", code="N036")
            deadline = deadline or time.monotonic() + self._timeout
            if time.monotonic() > deadline:
                raise LostPeer(
                    f"timed out after {self._timeout:g} s of waiting for rank {rank}", fix=self._fix(), code="N012"
                )
            time.sleep(_PAUSE)

    def _fix(self) -> str:
        return f"--launch.timeout {2 * self._timeout:g}, if that rank is slow but still runs; {ON_EVERY_RANK}"


def _check(exchange: int, row: np.ndarray[Any, np.dtype[np.float64]]) -> float:
    """Return a number that the values of another exchange are unlikely to have."""
    bits = np.bitwise_xor.reduce(np.ascontiguousarray(row[1:-1]).view(np.uint64))
    return float((int(bits) * 0x9E3779B97F4A7C15 + exchange) % 2**53)
