"""Every example that torchrun can start runs as a person would start it, and prints the same losses on one and two."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES

# float32 is rounded in another order on two ranks, and the losses have four digits; half precision rounds in the third.
TOLERANCE = {"04_mixed_precision.py": 5e-3}


def losses_in(text: str) -> list[float]:
    """Every number with four digits behind the point, in order.

    >>> losses_in("mb=2  losses 1.6713 0.0000")
    [1.6713, 0.0]
    """
    return [float(number) for number in re.findall(r"\d+\.\d{4}\b", text)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_one_process_and_two_print_the_same_losses(path: Path, one_and_two: Callable[[str], tuple[str, str]]) -> None:
    alone, both = one_and_two(path.name)
    assert len(alone.splitlines()) == len(both.splitlines()), both  # one rank speaks for all
    expected = losses_in(alone)
    assert len(expected) >= 3
    assert losses_in(both) == pytest.approx(expected, abs=TOLERANCE.get(path.name, 2e-4))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_says_how_to_start_it(path: Path) -> None:
    text = path.read_text()
    for start in ("python", "torchrun --nproc-per-node 2"):
        assert f"    {start} examples/{path.name}" in text.partition('"""\n\n')[0]
