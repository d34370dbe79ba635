"""docs/compositions.md is what the lists of proven plans make of it, and no pair of parallelisms is left open in it."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from tests.dist import compositions, table

PAGE = Path(__file__).parents[2] / "docs" / "compositions.md"
COMMAND = "python -m tests.dist.table > docs/compositions.md"


def test_the_page_is_what_the_plans_make_of_it() -> None:
    assert PAGE.read_text() == table.page(), f"docs/compositions.md is out of date; write it with: {COMMAND}"


def test_every_pair_is_proven_or_refused() -> None:
    assert table.unknown_pairs() == [], "add a plan with both to tests/dist/compositions.py, or refuse the pair"


def test_ci_runs_every_word_and_every_pair_of_axes() -> None:
    """As the page says, written out once more."""
    short = [plan.features for plan in compositions.in_short() if not plan.compiled]
    for plan in compositions.proven():
        if not plan.compiled:
            for word in plan.features:
                assert any(word in features for features in short), word
            for pair in combinations({compositions.axis_of(word) for word in plan.features}, 2):
                assert any(set(pair) <= {compositions.axis_of(word) for word in features} for features in short), pair
    assert len(compositions.in_short()) < 0.4 * len(compositions.proven())


def test_a_plan_with_something_new_is_run_by_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    new = compositions.Proven(4, "tp=2 pp=2 zb mb=2", "a new model", "test_compositions")
    monkeypatch.setattr(compositions, "proven", lambda: (*table.proven(), new))
    assert new in compositions.in_short.__wrapped__()


@pytest.mark.parametrize(
    ("words", "num_ranks", "expected"),
    [
        ("mb=2", 1, set()),
        ("zero=3", 1, set()),  # nobody to share with
        ("zero=3 mb=2", 2, {"`zero=3`"}),
        ("cp=2 zero=1", 2, {"`ring`", "`zero=1`"}),  # shared by cp ranks
        ("dp_replicate=2 tp=2 sp=off", 4, {"`dp_replicate`", "`sp=off`"}),
        ("tp=2 pp=2 zbv", 4, {"`sp=on`", "`zbv`"}),
        ("cp=2 ulysses ep=2 recompute=full", 2, {"`ulysses`", "`ep`", "`zero=3`", "`full`"}),
    ],
)
def test_what_a_plan_is_a_proof_of(words: str, num_ranks: int, expected: set[str]) -> None:
    assert table.features_of(words, num_ranks) == expected


def test_a_refusal_is_said_by_the_code_that_refuses() -> None:
    refused = table.refusal("`zb`", "`full`")
    assert refused is not None
    assert refused.startswith("zb splits each backward in two")
    assert table.refusal("`ring`", "`ulysses`") == "context is set twice: ring and ulysses"
    assert table.refusal("`ep`", "`1f1b`") is None


def test_a_pair_that_nobody_tries_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = tuple(plan for plan in table.proven() if not {"`ep`", "`gpipe`"} <= plan.features)
    monkeypatch.setattr(table, "proven", lambda: rest)
    assert ("`gpipe`", "`ep`") in table.unknown_pairs()
