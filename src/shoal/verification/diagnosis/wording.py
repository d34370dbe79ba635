"""Lists of names in a sentence."""

from __future__ import annotations

from collections.abc import Iterable


def joined(words: Iterable[object], conjunction: str = "and") -> str:
    """Join words for a sentence.

    >>> joined([1, 2, 3]), joined(["tp", "pp"], "or")
    ('1, 2 and 3', 'tp or pp')
    """
    *front, last = [str(word) for word in words] or [""]
    return f"{', '.join(front)} {conjunction} {last}" if front else last
