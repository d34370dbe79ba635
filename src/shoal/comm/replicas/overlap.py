"""Time that communication between replicas took, and the part of it that computation hid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication of one step, on one rank.

    >>> Overlap(seconds=0.4, exposed=0.1, bytes=0).part
    0.75
    """

    seconds: float
    """Time in which at least one collective was in flight."""
    exposed: float
    """The part of it after the last gradient was computed."""
    bytes: int
    """Bytes that this rank has sent."""
    messages: int = 0
    """Buckets that were averaged."""

    @property
    def part(self) -> float:
        """The hidden fraction, from 0 to 1."""
        return max(0.0, 1.0 - self.exposed / self.seconds) if self.seconds else 1.0

    @classmethod
    def of(cls, times: Iterable[tuple[float, float]], num_bytes: int, *, ready: float) -> Overlap:
        """Merge collectives, given as (begin, end), that may overlap; `ready` is when the last gradient was computed.

        >>> Overlap.of([(0.0, 2.0), (1.0, 4.0), (6.0, 7.0)], 8, ready=3.0)
        Overlap(seconds=5.0, exposed=2.0, bytes=8, messages=3)
        """
        busy, exposed, until = 0.0, 0.0, float("-inf")
        every = sorted(times)
        for began, ended in every:
            start = max(began, until)
            busy += max(0.0, ended - start)
            exposed += max(0.0, ended - max(start, ready))
            until = max(until, ended)
        return cls(busy, exposed, num_bytes, len(every))
