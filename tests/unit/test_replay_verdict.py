"""The words of a verdict on gradients: they say up to which step checkpoints are good."""

from __future__ import annotations

import pytest

from shoal.train.replay.verdict import Found, failure_of

FOUND = {
    "T075": Found(always=(1,), agreeing=(0, 2), tensors=("w",)),
    "T076": Found(once=(1,), agreeing=(0, 2), tensors=("w",)),
    "T077": Found(undecided=(0, 1), tensors=("w",)),
    "T078": Found(once=(0, 1, 2), tensors=("w",)),
}


@pytest.mark.parametrize("code", FOUND)
def test_every_verdict_has_the_last_good_step(code: str) -> None:
    failure = failure_of(FOUND[code], step=200, agreed_at=100, num_ranks=3)
    assert failure.codes == (code,)
    assert "step 100" in str(failure)
    assert "step 100" not in str(failure_of(FOUND[code], step=200, agreed_at=None, num_ranks=3))


def test_a_run_that_restarts_says_it_in_its_first_line() -> None:
    """Of a failure after which the run restarts, no more is printed."""
    first = str(failure_of(FOUND["T076"], step=200, agreed_at=100, num_ranks=3)).splitlines()[0]
    assert "differs from its replay; they were last equal in step 100" in first
