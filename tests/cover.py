"""Which rows of a wide table `make test` runs: few, that have all there is in it. `make test-all` runs every row.

A row is chosen for its traits, such as the words in it and its pairs of axes. A new row is chosen by
itself if it has a trait that no other has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

import pytest

Traits = Collection[Hashable]


def covering(rows: Sequence[Traits], costs: Sequence[float] | None = None) -> list[int]:
    """The numbers of some rows that have every trait of all rows, in their order; cheap ones rather than dear ones.

    >>> covering([{"a"}, {"a", "b"}, {"c"}, {"b", "c"}])
    [1, 2]
    >>> covering([{"a", "b"}, {"a"}, {"b"}], costs=[3, 1, 1])
    [1, 2]
    """
    price = costs or [1.0] * len(rows)
    missing = {trait for row in rows for trait in row}
    chosen: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda row: len(missing.intersection(rows[row])) / price[row])
        chosen.append(best)
        missing.difference_update(rows[best])
    for row in sorted(chosen, key=lambda row: -price[row]):  # what was chosen early may have become superfluous
        others = {trait for other in chosen if other != row for trait in rows[other]}
        if others.issuperset(rows[row]):
            chosen.remove(row)
    return sorted(chosen)


def covered(
    rows: Sequence[tuple[Any, ...]],
    traits: Callable[..., Traits],
    cost: Callable[..., float] = lambda *_: 1.0,
) -> list[Any]:
    """The rows for `parametrize`: those that `make test` does not need are marked `wide`."""
    chosen = set(covering([traits(*row) for row in rows], [cost(*row) for row in rows]))
    return [row if number in chosen else wide(*row) for number, row in enumerate(rows)]


def examples(few: int, many: int) -> int:
    """How many examples hypothesis draws: `few` in `make test`, `many` in `make test-all`."""
    return many if os.environ.get("SHOAL_ALL") else few


def wide(*row: Any) -> Any:
    """A row that only `make test-all` runs."""
    return pytest.param(*row, marks=pytest.mark.wide)
