"""The output of a host as whole lines: two hosts that print at one time do not mix their lines.

A progress bar ends its lines with a carriage return. A program may also print for ever without an end of a line, so
more than `MOST_KEPT` characters are a line, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_KEPT = 8192
"""Characters of a line without an end that are kept back."""


@dataclass(slots=True)
class Lines:
    """The lines of one output stream."""

    _kept: list[str] = field(default_factory=list)
    """Pieces of the line that has no end yet."""
    _num_kept: int = 0
    _ends_with_return: bool = False
    """Whether the last piece ended with a carriage return, whose newline may follow."""

    def add(self, text: str) -> list[str]:
        """Return the lines that a piece of output has completed."""
        text = "\r" * self._ends_with_return + text
        self._ends_with_return = text.endswith("\r")
        lines: list[str] = []
        *whole, rest = text.removesuffix("\r").replace("\r\n", "\n").split("\n")
        for each in whole:
            lines += self._without_returns(each) or [""]
        *overwritten, rest = rest.split("\r")
        lines += self._without_returns("\r".join(overwritten)) if overwritten else []
        if rest:
            self._kept.append(rest)
            self._num_kept += len(rest)
        return [*lines, *(self.flush() if self._num_kept > MOST_KEPT else [])]

    def _without_returns(self, line: str) -> list[str]:
        """The parts of a line between carriage returns, after what was kept."""
        first, *others = line.split("\r")
        return [*self.flush(first), *(each for each in others if each)]

    def flush(self, end: str = "") -> list[str]:
        """Return the line that has no end yet, if there is one, with its end."""
        line = "".join(self._kept) + end
        self._kept, self._num_kept = [], 0
        return [line] if line else []
