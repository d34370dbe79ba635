"""Bubble and microbatches in flight that the planner uses: those of the whole schedule, however long the step."""

from __future__ import annotations

from typing import get_args

import pytest

from shoal.blueprint.plan import VIRTUAL_STAGES, Schedule
from shoal.blueprint.schedules import counts, simulate
from shoal.blueprint.schedules.counts import bubble, in_flight, runnable
from shoal.blueprint.schedules.schedule_orders import check_schedule, make_schedule, rank_order
from shoal.blueprint.schedules.simulate import StageCost

SCHEDULES: list[tuple[Schedule, int]] = [
    (word, v) for word in get_args(Schedule) for v in (1, 2, 3, 4) if VIRTUAL_STAGES.get(word, v) == v
]
UNIT = StageCost(forward=1, input_grad=1, weight_grad=1)


def legal(word: Schedule, pp: int, v: int, most: int) -> list[int]:
    every = range(1, most + 1)
    return [m for m in every if not check_schedule(word, num_ranks=pp, v=v, num_microbatches=m)]


@pytest.mark.parametrize(("word", "v"), SCHEDULES)
def test_both_counts_are_those_of_the_simulation(word: Schedule, v: int) -> None:
    for pp in range(2, 5):
        for m in legal(word, pp, v, 3 * pp + 1):
            table = make_schedule(word, num_ranks=pp, v=v, num_microbatches=m)
            waited = simulate.simulate(table, UNIT).bubble_seconds
            assert bubble(word, num_ranks=pp, v=v, num_microbatches=m) == waited / (3 * v * (pp - 1)), (pp, m)
            stored = [in_flight(word, rank, num_ranks=pp, v=v, num_microbatches=m) for rank in range(pp)]
            assert stored == [number / v for number in simulate.in_flight(table)], (pp, m)


@pytest.mark.parametrize(("word", "v"), SCHEDULES)
def test_a_long_step_counts_as_if_it_were_played_whole(word: Schedule, v: int) -> None:
    """Every legal number of microbatches up to four rounds."""
    for pp in range(1, 9):
        for m in legal(word, pp, v, 4 * pp + 1):
            stored = [in_flight(word, rank, num_ranks=pp, v=v, num_microbatches=m) for rank in range(pp)]
            if pp == 1:  # no pipeline: one microbatch after the other, whatever the schedule
                assert (bubble(word, num_ranks=1, v=v, num_microbatches=m), stored) == (0.0, [1.0])
                continue
            whole = counts._idle_units.__wrapped__(word, pp, v, m)
            assert bubble(word, num_ranks=pp, v=v, num_microbatches=m) == whole / (3 * v * (pp - 1)), (pp, m)
            assert stored == [counts._most_stored.__wrapped__(word, rank, pp, v, m) / v for rank in range(pp)], (pp, m)
            assert max(stored) in (stored[0], stored[-1]), "memory is predicted for these two"


@pytest.mark.parametrize(("word", "v"), SCHEDULES)
def test_a_step_of_any_length_is_played_with_three_rounds_at_most(
    word: Schedule, v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts._idle_units.cache_clear()
    counts._most_stored.cache_clear()
    played: list[int] = []
    monkeypatch.setattr(counts, "rank_order", lambda *given: played.append(given[-1]) or rank_order(*given))
    in_flight(word, 0, num_ranks=7, v=v, num_microbatches=7 * 2**20)
    bubble(word, num_ranks=7, v=v, num_microbatches=7 * 2**20)
    assert played
    assert max(played) <= 3 * 7


def test_numbers_of_microbatches_that_only_other_systems_run() -> None:
    for word, v in SCHEDULES:
        for pp in range(2, 7):
            for m in range(1, 5 * pp):
                more = runnable(word, pp, m)
                assert m <= more
                if more >= pp:  # fewer leave ranks idle, and can be played
                    assert not check_schedule(word, num_ranks=pp, v=v, num_microbatches=more)
                assert bubble(word, num_ranks=pp, v=v, num_microbatches=m) > 0
                assert 0 < in_flight(word, 0, num_ranks=pp, v=v, num_microbatches=m) <= m


def test_uneven_rounds_hold_more_than_even_ones() -> None:
    """Numbers that no closed form of the literature has: a round of 6 on 4 ranks, and a zbv that is not yet filled."""
    assert in_flight("interleaved", 0, num_ranks=4, v=2, num_microbatches=8) == 5.5
    assert in_flight("interleaved", 0, num_ranks=4, v=2, num_microbatches=10) == 6.0
    assert [in_flight("zbv", rank, num_ranks=4, v=2, num_microbatches=4) for rank in (0, 3)] == [2.5, 4.0]
    assert bubble("zbv", num_ranks=4, v=2, num_microbatches=5) == pytest.approx(4 / 18)


@pytest.mark.parametrize(("word", "v"), [("interleaved", 4), ("interleaved", 5), ("looped", 4), ("zb", 4)])
def test_stages_are_fetched_as_if_the_step_were_played_whole(word: Schedule, v: int) -> None:
    for pp in range(2, 5):
        for m in legal(word, pp, v, 5 * pp):
            for rank in (0, pp - 1):
                found = counts.fetches(word, rank, num_ranks=pp, v=v, num_microbatches=m, kept=3)
                assert found == counts._fetches(word, rank, pp, v, m, 3), (pp, m, rank)


def test_a_stage_is_fetched_whenever_it_comes_among_the_next_to_compute() -> None:
    order = make_schedule("interleaved", num_ranks=2, v=4, num_microbatches=4).order(1)
    stages = [action.stage for slot in order for action in slot.parts]
    for stage, number in counts.fetches("interleaved", 1, num_ranks=2, v=4, num_microbatches=4, kept=3).items():
        is_next = [stage in list(dict.fromkeys(stages[place:]))[:3] for place in range(len(stages))]
        assert number == sum(now and not before for before, now in zip([False, *is_next], is_next, strict=False))
