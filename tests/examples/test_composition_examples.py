"""The examples of expert and context parallelism run as a person would start them, and keep their word."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.examples.host import run_for_real
from tests.readme.fork_host import Ran


def long_context() -> Ran:
    return run_for_real("10_long_context.py", timeout=230)


def losses_in(text: str) -> list[float]:
    """Every number with four digits behind the point.

    >>> losses_in("loss 2.6031 0.5197")
    [2.6031, 0.5197]
    """
    return [float(number) for number in re.findall(r"\d+\.\d{4}\b", text)]


def test_a_model_of_ones_own_has_half_of_its_experts_on_each_of_two_ranks(
    one_and_two: Callable[[str], tuple[str, str]],
) -> None:
    # That its losses are those of one process, test_examples.py says.
    rows, *epochs = one_and_two("09_moe.py")[1].splitlines()
    assert re.findall(r"(\d+) of (\d+)", rows) == [("256", "512")] * 2
    assert len(epochs) == 4
    losses = [losses_in(line)[0] for line in epochs]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.3 * losses[0]
    for line in epochs:
        hottest = re.findall(r"block (\d): hottest expert (\d), (\d\.\d\d) x mean", line)
        assert [block for block, _, _ in hottest] == ["0", "1"]
        assert all(int(expert) < 8 and 1.0 < float(times) < 4.0 for _, expert, times in hottest)


@pytest.mark.wide
@pytest.mark.timeout(240)
def test_a_sequence_that_does_not_fit_trains_on_four_ranks(once: Callable[..., Any]) -> None:
    """Exit code 0 says that one process was refused and that four have trained."""
    ran = once(long_context)
    assert ran.code == 0, ran.stdout + ran.stderr[-3000:]
    _, alone, shared, refused, trained = ran.stdout.splitlines()
    need_alone, need_shared = (float(re.findall(r"needs +(\d+) MiB", line)[0]) for line in (alone, shared))
    assert need_shared < 0.75 * need_alone
    limits = [int(re.findall(r" (\d+) MiB", line)[0]) for line in (refused, trained)]
    assert limits == [pytest.approx((need_alone + need_shared) / 2, abs=1.0)] * 2
    assert "tried to allocate" in refused
    losses = losses_in(trained)
    assert len(losses) == 3
    assert losses[-1] < 0.95 * losses[0]
    # The first loss is of the same weights, whoever computes it and whatever the limit.
    assert [*losses_in(alone), *losses_in(shared)] == pytest.approx([losses[0]] * 2, abs=2e-4)
