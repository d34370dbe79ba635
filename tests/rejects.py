"""Assert the code of an error and the values in its message; the words may change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.errors import Problem, ShoalError


@contextmanager
def rejects(
    code: str, *values: object, match: str | None = None, kind: type[ShoalError] = ShoalError
) -> Iterator[pytest.ExceptionInfo[ShoalError]]:
    """The block must raise an error with a problem of this code whose text, with its fix, contains all values.

    `match` is a regular expression for what no value expresses. Fixes are those of the command line.

    with rejects("P011", "batch 10", "dp_replicate=4"):
        plan.num_microbatches(10)
    """
    with pytest.raises(kind) as caught:
        yield caught
    text = caught.value.on_command_line()
    assert match is None or re.search(match, text), f"expected {match!r} in: {text}"
    of_code = [problem for problem in caught.value.problems if problem.code == code]
    assert of_code, f"expected {code}, got {', '.join(caught.value.codes)}: {caught.value}"
    assert any(has_all(problem, values) for problem in of_code), f"expected {values} in: {caught.value}"


def has_all(problem: Problem, values: tuple[object, ...]) -> bool:
    return all(str(value) in str(problem) for value in values)
