"""The schedule of a drill: a pure function of its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.chaos.kinds import KINDS

DOUBLE = 0.15
"""The part of faults that follow another one at once, while the run recovers from it."""
SOON = 1.5
"""Seconds in which such a fault follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One fault of a schedule."""

    number: int
    at: float
    """Seconds after the first step of the run."""
    kind: str
    rank: int
    """The rank that fails, or one of the host that does."""
    seconds: float = 0.0
    """How long it lasts; a jump of the clock: by how much."""
    is_double: bool = False
    """Whether it happens although the run has not recovered from the one before."""

    def __str__(self) -> str:
        where = {"rank": f" rank {self.rank}", "host": f" the host of rank {self.rank}", "run": ""}
        lasts = f" ({self.seconds:.1f} s)" if self.seconds else ""
        double = ", at once" if self.is_double else ""
        return f"{self.at:7.1f} s  {self.kind}{where[KINDS[self.kind].target]}{lasts}{double}"


def draw_schedule(seed: int, *, faults: int, seconds: float, kinds: Sequence[str], ranks: int) -> list[Injection]:
    """Draw the faults of a drill of that many seconds.

    Each fault has a slot of the time, in which its moment is random. Kinds come in rounds of a shuffled order, so that
    each kind comes as often as any other. No rank and no host is spared.

    >>> [str(each) for each in draw_schedule(1, faults=2, seconds=60, kinds=["kill"], ranks=4)]
    ['    0.0 s  kill rank 1', '   51.6 s  kill rank 0']
    """
    rng = random.Random(f"shoal chaos {seed}")
    found: list[Injection] = []
    bag: list[str] = []
    for number in range(faults):
        if not bag:
            bag = rng.sample(list(kinds), len(kinds))
        kind, slot = bag.pop(), seconds / faults
        at = (number + rng.random()) * slot
        is_double = rng.random() < DOUBLE and bool(found)
        if is_double:
            at = found[-1].at + SOON * rng.random()
        rank, length = rng.randrange(ranks), round(rng.uniform(*KINDS[kind].seconds), 1)
        found.append(
            Injection(number=number + 1, at=round(at, 2), kind=kind, rank=rank, seconds=length, is_double=is_double)
        )
    return found
