"""Lines of other hosts: their ends may be missing, cut in two, or carriage returns."""

from __future__ import annotations

import pytest

from shoal.launch.hosts.output import MOST_KEPT, Lines


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["half of ", "a line\nand"], ["half of a line", "and"]),
        (["a\r\nb\r", "\nc\n\n"], ["a", "b", "c", ""]),
        (["\r1%", "\r2%\r", "3%\rdone\n"], ["1%", "2%", "3%", "done"]),
        (["x" * MOST_KEPT, "y", "z"], ["x" * MOST_KEPT + "y", "z"]),
        (["\r" * 5, "a\r", "\n"], ["a"]),
    ],
)
def test_lines_are_whole_whatever_ends_them(pieces: list[str], expected: list[str]) -> None:
    lines = Lines()
    found = [line for piece in pieces for line in lines.add(piece)]
    assert [*found, *lines.flush()] == expected


def test_output_without_an_end_is_not_kept() -> None:
    lines = Lines()
    for _ in range(100):
        lines.add("x" * 1000)
        assert sum(map(len, lines._kept)) <= MOST_KEPT
