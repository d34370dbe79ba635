"""Causes of slow steps that are put in are named by the profile: the cases of benchmarks/profile/causes.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.profile.causes import SCALES, Injected, cases, is_named, outcome


def test_there_are_twenty_cases_and_a_seed_repeats_them() -> None:
    found = cases(0)
    assert found == cases(0) != cases(1)
    assert len(found) == 20
    assert set(Counter(case.cause for case in found)) == {
        "loader", "rank", "link", "bucket", "recompute", "cores", "disk",
    }  # fmt: skip


def test_a_cause_is_named_with_its_rank_and_its_advice() -> None:
    slow = Injected("rank", "zero=3", "straggler", rank=1)
    assert is_named(slow, {"kind": "straggler", "rank": 1})
    assert not is_named(slow, {"kind": "straggler", "rank": 0})
    assert not is_named(slow, {"kind": "data"})
    assert not is_named(Injected("bucket", "ddp", "link"), {"kind": "link", "next": "fewer bytes"})


@pytest.mark.wide
@pytest.mark.alone
@pytest.mark.timeout(700)
@pytest.mark.parametrize("case", cases(0), ids=lambda case: f"{case.cause} {case.plan}")
def test_a_cause_that_is_put_in_is_the_verdict(case: Injected) -> None:
    """On a busy machine, at the second size."""
    verdicts = []
    for scale in SCALES:
        verdicts.append(outcome(replace(case, seconds=case.seconds * scale))["verdict"])
        if is_named(case, verdicts[-1]):
            return
    pytest.fail(f"{case}: {verdicts}")
