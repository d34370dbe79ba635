"""Ranks on one machine exchange numbers through shared memory: right sums, the same bits, every wait bounded."""

from __future__ import annotations

import gc
import math
import multiprocessing
import random
import time
from pathlib import Path

import numpy as np
import pytest

from shoal.comm.shared_board import WIDTH, Board
from shoal.errors import LostPeer
from tests.rejects import rejects


def boards(path: Path, size: int, timeout: float = 10.0) -> list[Board]:
    Board.create(path, size)
    return [Board(path, rank=rank, size=size, timeout=timeout) for rank in range(size)]


def test_sums_are_those_of_all_ranks(tmp_path: Path) -> None:
    three = boards(tmp_path / "board", 3)
    for step in range(5):
        numbers = [board.post([0.1 * rank + step, 1.0]) for rank, board in enumerate(three)]
        sums = [board.sum(number, 2) for board, number in zip(three, numbers, strict=True)]
        assert sums[0] == sums[1] == sums[2] == [pytest.approx(0.3 + 3 * step), 3.0]


def exchange(path: Path, rank: int, size: int, results: Path) -> None:
    board, found = Board(path, rank=rank, size=size, timeout=60.0), []
    for step in range(2000):
        if random.random() < 0.01:
            time.sleep(0.002 * random.random())
        number = board.post([float(step), float(rank)])
        found.append(board.sum(number, 2) if random.random() < 0.9 else [math.nan, math.nan])  # or it does not look
    np.save(results / f"{rank}.npy", np.array(found))


def test_processes_that_are_early_and_late_never_read_another_exchange(tmp_path: Path) -> None:
    size, path = 3, tmp_path / "board"
    Board.create(path, size)
    fork = multiprocessing.get_context("fork")
    gc.collect()
    gc.freeze()  # a fork that collects a process group of an earlier test waits for threads that it does not have
    ranks = [fork.Process(target=exchange, args=(path, rank, size, tmp_path)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    expected = np.array([[size * step, sum(range(size))] for step in range(2000)])
    for rank in range(size):
        found = np.load(tmp_path / f"{rank}.npy")
        looked = ~np.isnan(found[:, 0])
        assert 1000 < looked.sum() < 2000
        assert np.array_equal(found[looked], expected[looked])


def test_values_that_are_not_there_yet_are_not_taken(tmp_path: Path) -> None:
    """A processor may show the number of an exchange before its values."""
    first, second = boards(tmp_path / "board", 2, timeout=0.2)
    first.post([1.0])
    number = second.post([2.0])
    rows = np.memmap(tmp_path / "board", np.float64, "r+", shape=(2, 2, WIDTH))
    rows[1, 1, 1] = 7.0
    with rejects("N012", "0.2", "rank 1", kind=LostPeer):
        first.sum(number, 1)
    rows[1, 1, 1] = 2.0
    assert first.sum(number, 1) == [3.0]


def test_a_second_world_does_not_read_what_the_first_has_left(tmp_path: Path) -> None:
    for board in boards(tmp_path / "board", 2):
        board.post([5.0])
    first, second = (Board(tmp_path / "board", rank=rank, size=2, timeout=0.1) for rank in range(2))
    number = first.post([1.0])
    with pytest.raises(LostPeer):
        first.sum(number, 1)
    second.post([2.0])
    assert first.sum(number, 1) == [3.0]
