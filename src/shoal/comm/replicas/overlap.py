"""How long what replicas send each other was on its way, and how much of that nobody had to wait for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """Of one step, on one rank.

    >>> Hidden(seconds=0.4, exposed=0.1, bytes=0).part
    0.75
    """

    seconds: float
    """That something travelled."""
    exposed: float
    """That of it which came after the last gradient was computed."""
    bytes: int
    """That this rank has sent."""

    @property
    def part(self) -> float:
        """What was hidden, from 0 to 1."""
        return max(0.0, 1.0 - self.exposed / self.seconds) if self.seconds else 1.0

    @classmethod
    def of(cls, times: Iterable[tuple[float, float]], num_bytes: int, *, ready: float) -> Overlap:
        """Of messages that may overlap, each from when it began to when it had arrived; the last gradient was `ready`.

        >>> Hidden.of([(0.0, 2.0), (1.0, 4.0), (6.0, 7.0)], 8, ready=3.0)
        Hidden(seconds=5.0, exposed=2.0, bytes=8)
        """
        busy, exposed, until = 0.0, 0.0, float("-inf")
        for began, ended in sorted(times):
            start = max(began, until)
            busy += max(0.0, ended - start)
            exposed += max(0.0, ended - max(start, ready))
            until = max(until, ended)
        return cls(busy, exposed, num_bytes)
