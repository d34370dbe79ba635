"""A pipeline takes the time that its simulation says: blocks that sleep, on real ranks, with every schedule.

The short version of benchmarks/bubble, where the bound is 10 % and sleeps are longer.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.bubble.run import SCHEDULES, Moments, asleep_and_awake, measured, predicted
from shoal.blueprint.plan import Schedule
from shoal.blueprint.schedules.simulate import StageCost, Timeline
from tests.cover import wide
from tests.dist.pool import Pool

pytestmark = pytest.mark.alone

UNIT = 0.010  # seconds
BOUND = 1.15  # the runtime's own time is 3 to 5 % of sleeps this short; the rest is what else this machine does
SCALES = (1, 4)  # on a busy machine, once more with longer sleeps; a wrong simulation is as wrong with those


@pytest.mark.parametrize("word", [word if word in ("1f1b", "zb", "dualpipev") else wide(word) for word in SCHEDULES])
def test_two_ranks_take_what_the_simulation_says(pool: Pool, word: Schedule) -> None:
    check(pool, word, num_ranks=2)


@pytest.mark.parametrize("word", [wide("1f1b"), "zbv"])
def test_four_ranks_take_what_the_simulation_says(pool: Pool, word: Schedule) -> None:
    check(pool, word, num_ranks=4)


def check(pool: Pool, word: Schedule, *, num_ranks: int) -> None:
    for scale in SCALES:
        unit = UNIT * scale
        cost = StageCost(forward=2 * unit, input_grad=3 * unit, weight_grad=unit)
        timeline = predicted(word, num_ranks, cost)
        ranks = [asleep for asleep, _ in pool.run(asleep_and_awake, num_ranks, word, cost, 2)]
        wrong = list(deviations(timeline, ranks, unit))
        if not wrong:
            return
    pytest.fail("\n".join(wrong))


def deviations(timeline: Timeline, ranks: list[list[Moments]], unit: float) -> Iterator[str]:
    """What took shorter than the sleeps in it, or much longer in each of the steps."""
    wall = min(measured([[moments] for moments in step]).wall for step in zip(*ranks, strict=True))
    if not 1 <= wall / timeline.total < BOUND:
        yield f"a step took {wall:.4f} s, and {timeline.total:.4f} s are predicted"
    for rank, spans in enumerate(timeline.spans):
        parts = [part for span in spans for part in span.slot.parts]
        shortest = map(min, zip(*(step.seconds for step in ranks[rank]), strict=True))
        for part, seconds in zip(parts, shortest, strict=True):
            expected = timeline.costs[part.stage].seconds(part.kind)
            if not expected <= seconds < expected + 0.9 * unit:
                yield f"rank {rank}: {part} took {seconds:.4f} s, and {expected:.4f} s are predicted"
