"""Partition of a model into stages, compared with every other partition."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.blueprint.partition import partition
from tests.rejects import rejects

COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def stage_costs(costs: list[int], stages: tuple[range, ...], first: int, last: int) -> list[int]:
    sums = [sum(costs[block] for block in stage) for stage in stages]
    sums[0] += first
    sums[-1] += last
    return sums


def every_way(num_blocks: int, num_stages: int) -> list[tuple[range, ...]]:
    return [
        tuple(range(start, stop) for start, stop in zip((0, *cuts), (*cuts, num_blocks), strict=True))
        for cuts in combinations(range(1, num_blocks), num_stages - 1)
    ]


@example([0, 9, 7, 20, 12, 15, 0], 5, 12, 18)  # two ways with equally large stages, of which rounding saw one
@given(COSTS, st.integers(1, 9), st.integers(0, 30), st.integers(0, 30))
def test_no_way_to_cut_is_better(costs: list[int], num_stages: int, first: int, last: int) -> None:
    num_stages = min(num_stages, len(costs))
    ways = every_way(len(costs), num_stages)
    found = partition(costs, num_stages, first=first, last=last)
    assert found in ways

    def badness(way: tuple[range, ...]) -> tuple[int, int]:
        sums = stage_costs(costs, way, first, last)
        return max(sums), sum(cost * cost for cost in sums)

    assert badness(found) == min(map(badness, ways))


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "first", "last", "lengths"),
    [
        (8, 4, 0, 0, [2, 2, 2, 2]),
        (8, 4, 2, 0, [1, 2, 2, 3]),
        (8, 4, 0, 1, [2, 2, 3, 1]),
        (10, 4, 0, 0, [2, 2, 3, 3]),  # the early stages keep most activations, so they are the short ones
        (3, 3, 9, 9, [1, 1, 1]),
        (5, 1, 0, 0, [5]),
    ],
)
def test_equal_blocks(num_blocks: int, num_stages: int, first: float, last: float, lengths: list[int]) -> None:
    for scale in (1e-6, 0.1, 1.0, 1e6):  # none of which may decide a tie
        stages = partition([scale] * num_blocks, num_stages, first=first * scale, last=last * scale)
        assert [len(stage) for stage in stages] == lengths


@pytest.mark.parametrize(
    ("costs", "num_stages", "code", "values"),
    [
        ([1, 1], 3, "P042", ("2 blocks", "3 stages", "pp=1 or 2")),
        ([1] * 32, 64, "P042", ("32 blocks", "64 stages", "pp=1 to 32")),
        ([1, 1], 0, "P042", ("2 blocks", "0 stages")),
        ([], 1, "P041", ("blocks",)),
        ([1, -1], 1, "P054", ("block 1", "-1")),
        ([1, float("nan")], 1, "P054", ("block 1", "nan")),
    ],
)
def test_what_cannot_be_cut(costs: list[float], num_stages: int, code: str, values: tuple[str, ...]) -> None:
    with rejects(code, *values):
        partition(costs, num_stages)
