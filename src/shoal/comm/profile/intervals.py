"""Time that is covered by intervals which may overlap."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[int, int]
"""Begin and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order.

    >>> union([(5, 7), (0, 2), (1, 4), (7, 8)])
    [(0, 4), (5, 8)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> int:
    """The time in which at least one interval is open.

    >>> length([(0, 2), (1, 4), (5, 7)])
    6
    """
    return sum(end - begin for begin, end in union(intervals))


def without(intervals: Iterable[Interval], others: Iterable[Interval]) -> int:
    """The time of some intervals in which none of the others is open.

    >>> without([(0, 10)], [(2, 4), (3, 5), (9, 12)])
    6
    """
    ours, theirs = list(intervals), list(others)
    return length([*ours, *theirs]) - length(theirs)
