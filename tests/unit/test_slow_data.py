"""The warning that steps wait for data."""

from __future__ import annotations

from shoal.observe.slow_data import WINDOW, SlowData


def warnings(steps: list[tuple[float, float]], *, workers: int = 0) -> list[tuple[int, str, str]]:
    """The number of the step, the text and the fix of each warning."""
    slow = SlowData()
    found = [(number, slow.warning(*step, workers=workers)) for number, step in enumerate(steps, 1)]
    return [(number, str(each.what), str(each.fix)) for number, each in found if each is not None]


def test_it_warns_once_after_two_windows() -> None:
    ((number, what, fix),) = warnings([(0.1, 0.034)] * 100, workers=2)
    assert number == 2 * WINDOW
    assert what == "the last 20 steps waited 34% of their time for data; 2 processes prepare it"
    assert fix == "--data.workers 4 --data.prefetch 4"


def test_neither_a_slow_start_nor_one_late_batch_is_a_warning() -> None:
    assert warnings([(5.0, 4.9)] * WINDOW + [(0.1, 0.005)] * 100) == []
    assert warnings([(0.1, 0.0)] * 50 + [(0.3, 0.2)] + [(0.1, 0.0)] * 50) == []


def test_data_that_becomes_slow_is_noticed() -> None:
    ((number, _, fix),) = warnings([(0.1, 0.0)] * 50 + [(0.2, 0.1)] * 50)
    assert 50 < number < 50 + WINDOW
    assert fix == "--data.workers 2 --data.prefetch 4"
