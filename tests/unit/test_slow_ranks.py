"""One slow rank is the verdict, also where a third rank has waited for it first, and where stages of a pipeline do."""

from __future__ import annotations

import pytest

from shoal.observe.profile.partition import RankParts
from shoal.observe.profile.record import RankRecord
from shoal.observe.profile.verdict import Verdict, judge


def verdict(*ranks: tuple[dict[str, float], dict[int, float]]) -> Verdict:
    """That of ranks with these parts of a step, and these seconds for which they have waited for others."""
    found = [
        RankParts(
            RankRecord(rank=number, steps=[], entered={}, host="a", place={}, threads=1, cores=64),
            steps=[parts],
            seconds=[sum(parts.values())],
            late_for=dict(late_for),
        )
        for number, (parts, late_for) in enumerate(ranks)
    ]
    return judge(found, lambda _: "")


def test_a_rank_that_was_late_because_of_a_third_is_not_blamed() -> None:
    """Two replicas of two tensor-parallel ranks: rank 2 waits for rank 3 along tp, and rank 0 for rank 2 along dp."""
    found = verdict(
        ({"forward": 0.1, "dp_replicate.late": 0.2}, {2: 0.2}),
        ({"forward": 0.1, "dp_replicate.late": 0.2}, {3: 0.2}),
        ({"forward": 0.1, "tp.late": 0.2}, {3: 0.2}),
        ({"forward": 0.3}, {2: 0.01}),
    )
    assert (found.kind, found.rank) == ("straggler", 3)
    assert found.cost == pytest.approx(0.2 / 0.3, rel=0.05)
    assert "200 ms more in forward" in found.evidence


def test_ranks_that_are_late_in_turns_are_no_chain() -> None:
    each = {"forward": 0.2, "dp_replicate.late": 0.1}
    found = verdict((each, {1: 0.06, 2: 0.04}), (each, {2: 0.06, 0: 0.04}), (each, {0: 0.06, 1: 0.04}))
    assert found.kind == "jitter"


def test_a_rank_that_loads_for_longer_is_no_slow_machine() -> None:
    found = verdict(({"forward": 0.1, "dp_shard.late": 0.2}, {1: 0.2}), ({"forward": 0.1, "data": 0.2}, {}))
    assert (found.kind, found.rank) == ("data", None)
    assert "rank 1, which spends 200 ms more in data" in found.evidence


@pytest.mark.parametrize(
    ("more", "kind", "rank"), [(0.2, "straggler", 1), (0.0, "bubble", None), (0.02, "bubble", None)]
)
def test_a_slow_stage_is_no_bubble(more: float, kind: str, rank: int | None) -> None:
    """The schedule alone leaves each stage idle for 60 ms here."""
    found = verdict(({"forward": 0.1, "bubble": 0.06 + more}, {}), ({"forward": 0.1 + more, "bubble": 0.06}, {}))
    assert (found.kind, found.rank) == (kind, rank)
