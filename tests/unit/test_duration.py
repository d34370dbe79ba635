"""Durations: read, printed and turned into steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.duration import UNITS, Duration
from tests.rejects import rejects


@given(st.floats(min_value=0, max_value=1e15, allow_nan=False), st.sampled_from(UNITS))
def test_what_is_printed_reads_back_to_the_same(amount: float, unit: str) -> None:
    duration = Duration(amount, unit)
    assert Duration.parse(str(duration)) == duration


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("1000step", 1000, "step"),
        (1000, 1000, "step"),
        ("2epochs", 2, "epoch"),
        ("1e9tok", 1e9, "tok"),
        ("1.5 h", 1.5, "h"),
        ("10minutes", 10, "min"),
        ("90s", 90, "sec"),
    ],
)
def test_spellings(text: str | int, amount: float, unit: str) -> None:
    assert Duration.parse(text) == Duration(amount, unit)


@pytest.mark.parametrize("text", ["", "step", "12 parsecs", "1.2.3step", "-1step", "1e400step", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with rejects("R016"):
        Duration.parse(text)


def test_work_is_rounded_up_to_steps_and_time_is_not_steps() -> None:
    units = {"batch": 8, "samples_per_epoch": 100, "tokens_per_sample": 16}
    assert Duration.parse("2epoch").steps(**units) == 25
    assert Duration.parse("129tok").steps(**units) == 2
    assert Duration.parse("9sample").steps(**units) == 2
    assert Duration.parse("10min").steps(**units) is None
    assert Duration.parse("10min").seconds == 600
