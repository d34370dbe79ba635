"""The warning that steps wait for a slow link, and not for a slow rank."""

from __future__ import annotations

import pytest

from shoal.comm.profile.axis_overlap import AxisTime
from shoal.errors import Problem
from shoal.observe.slow_link import SlowLink


def warning(*ranks: list[float], axis: str = "dp_shard", seconds: float = 0.5) -> Problem | None:
    """What rank 0 says of the waits of every rank in some steps."""
    found = [SlowLink() for _ in ranks]
    for rank, waits in zip(found, ranks, strict=True):
        for wait in waits:
            rank.note({axis: AxisTime(wait, wait)}, seconds)
            rank.note({}, seconds)  # most steps are not timed
    return found[0].warning([rank.own() for rank in found])


def test_it_warns_once_of_the_axis_and_what_it_costs() -> None:
    found = warning([0.4, 0.2, 0.2], [0.4, 0.3, 0.2])
    assert found is not None
    assert found.code == "T101"
    assert "wait 40% of their time (200 of 500 ms) for messages of dp_shard" in found.what
    assert "diloco" in str(found.fix)
    slow = SlowLink()
    for _ in range(2):
        slow.note({"tp": AxisTime(0.4, 0.4)}, 0.5)
    both = [slow.own(), slow.own()]
    assert "--plan.tp 1" in str(slow.warning(both))
    assert slow.warning(both) is None


@pytest.mark.parametrize(
    ("why", "ranks"),
    {
        "a rank that is late waits little itself": ([0.4] * 3, [0.01] * 3),
        "ranks that are late in turns": ([0.4, 0.01, 0.4, 0.01], [0.01, 0.4, 0.01, 0.4]),
        "one slow step, the first": ([0.4], [0.4]),
        "less than a quarter": ([0.12] * 3, [0.12] * 3),
        "a rank that has measured nothing, as one that was replaced": ([0.4] * 3, []),
    }.items(),
)
def test_other_waits_are_no_slow_link(why: str, ranks: tuple[list[float], list[float]]) -> None:
    assert warning(*ranks) is None


@pytest.mark.parametrize(("without_core", "is_slow"), [(0.04, True), (0.06, False)])
def test_busy_cores_are_no_slow_link(without_core: float, is_slow: bool) -> None:
    """Of steps of half a second."""
    slow = SlowLink()
    for _ in range(3):
        slow.note({"tp": AxisTime(0.4, 0.4)}, 0.5, without_core=without_core)
    assert (slow.warning([slow.own(), slow.own()]) is not None) is is_slow


def test_short_steps_and_pipelines_have_no_warning() -> None:
    assert warning([0.015] * 3, [0.015] * 3, seconds=0.02) is None
    assert warning([0.4] * 3, [0.4] * 3, axis="pp") is None
    assert warning([0.4] * 3, [0.4] * 3, axis="dp_replicate") is not None
