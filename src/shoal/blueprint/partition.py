"""Cut a model into pipeline stages of balanced cost.

Torch takes the stages that it is given. A pipeline runs at the speed of its slowest stage, and equal numbers of blocks
are not equal work: the embedding sits on the first stage, the head and the loss on the last. So blocks are assigned by
cost. Criteria, in this order:

[1] the smallest largest stage;
[2] the smallest sum of squares, which makes stages alike;
[3] short early stages, since those store most activations.

    blocks   1 1 1 1 1 1 1 1 + head 2, 4 stages: the total is 10, so the largest stage is at least 3 [1]
    1 1 │ 1 1 │ 1 1 1 │ 1 + 2     squares 4 + 4 + 9 + 9 = 26 [2]: chosen
    1 1 │ 1 1 1 │ 1 1 │ 1 + 2     squares 26, too, and its second stage is longer [3]
    1 1 1 │ 1 1 │ 1 1 │ 1 + 2     squares 26, too, and its first stage is longer [3]
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

from shoal.errors import Problem, ShoalError, listed, raise_if

RESOLUTION = 2**32
"""Costs are compared as integers that sum to this: sums of floats would break ties by rounding."""


def partition(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[range, ...]:
    """The blocks of each stage, at least one each. `first` and `last` are the costs before and after all blocks.

    >>> partition([1, 1, 1, 1, 1, 1, 1, 1], 4)
    (range(0, 2), range(2, 4), range(4, 6), range(6, 8))
    >>> partition([1, 1, 1, 1, 1, 1, 1, 1], 4, last=2)
    (range(0, 2), range(2, 4), range(4, 7), range(7, 8))
    """
    raise_if(_problems(costs, num_stages, first, last))
    work = [*costs]
    work[0] += first  # the first block is always on the first stage, and the last on the last
    work[-1] += last
    total = math.fsum(work) or 1.0
    units = [round(cost / total * RESOLUTION) for cost in work]
    # [1] Rounding makes one of two equally large stages the larger one, by at most half a unit for each block.
    cuts = _most_even(units, num_stages, limit=_smallest_largest(units, num_stages) + len(units))
    return tuple(range(start, stop) for start, stop in pairwise(cuts))


def _problems(costs: Sequence[float], num_stages: int, first: float, last: float) -> list[Problem]:
    problems = [
        Problem("P054", f"the cost of {name} must be at least 0, got {cost}", "0")
        for name, cost in [("first", first), ("last", last), *((f"block {i}", cost) for i, cost in enumerate(costs))]
        if not 0 <= cost < math.inf
    ]
    if not costs:
        raise ShoalError("stages need blocks, but the model describes none", fix="pp=1", code="P041")
    if not 1 <= num_stages <= len(costs):
        legal = range(1, len(costs) + 1)
        fix = f"v=1 with pp={listed(legal) if len(costs) <= 4 else f'1 to {len(costs)}'}"
        problems.append(
            Problem("P042", f"{len(costs)} blocks cannot be cut into {num_stages} stages of at least one", fix)
        )
    return problems


def _smallest_largest(units: Sequence[int], num_stages: int) -> int:
    """The lowest possible cost of the largest stage. Cutting a stage in two never raises it."""
    return bisect_left(range(sum(units) + 1), True, key=lambda limit: _num_needed(units, limit) <= num_stages)


def _num_needed(units: Sequence[int], limit: int) -> float:
    """The number of stages if each takes as many blocks as the limit allows."""
    num_stages, room = 0, -1
    for cost in units:
        if cost > limit:  # [1] and earlier starts cost more
            return math.inf
        if cost > room:
            num_stages, room = num_stages + 1, limit
        room -= cost
    return num_stages


def _most_even(units: Sequence[int], num_stages: int, *, limit: int) -> list[int]:
    """The start of each stage, and the end, for the least sum of squares of stages within the limit."""
    before = [0, *accumulate(units)]  # cost of the first i blocks
    best: list[float] = [
        0,
        *[math.inf] * len(units),
    ]  # least sum of squares of the first i blocks so far
    starts: list[list[int]] = []  # stage → i → the start of that stage if it ends before block i
    for stage in range(num_stages):  # no stage is empty: at least a block for each stage before it and after it
        row, start_of = [math.inf] * len(best), [0] * len(best)
        for end in range(stage + 1, len(best) - (num_stages - 1 - stage)):
            least, until = math.inf, before[end]
            for start in range(end - 1, stage - 1, -1):
                cost = until - before[start]
                if cost > limit:  # [1] and earlier starts cost more
                    break
                total = (
                    best[start] + cost * cost
                )  # [2]; `<=` takes the earliest of equal starts: early stages stay short [3]
                if total <= least and total < math.inf:
                    least, start_of[end] = total, start
            row[end] = least
        best = row
        starts.append(start_of)
    cuts = [len(units)]
    for start_of in reversed(starts):
        cuts.append(start_of[cuts[-1]])
    return cuts[::-1]
