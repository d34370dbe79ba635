"""Count what the planner needs of a schedule: the bubble of equal stages, and the microbatches in flight on a rank.

Both are simulated from the order of actions of each rank (`rank_order`), which is torch's. `simulate` does so with a
cost for every stage. Here an action takes whole units of time, which is fast enough for a search of thousands of plans.

A long step is not simulated in full, since schedules repeat. After the first few rounds (`SETTLED`), each
round more adds nothing to the bubble. To the microbatches in flight it always adds the same number: none, or in gpipe
and looped all of them. So the first rounds are simulated, and the others are added. A round is pp microbatches, or the
round of interleaved and zb. `tests/unit/test_schedule_counts.py` compares both counts with the whole schedule.

Other systems run numbers of microbatches that a schedule here rejects. Interleaved and zb then fill up their last
round, and dualpipev its first two.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.blueprint.plan import Schedule
from shoal.blueprint.schedules.schedule_orders import num_rounds, rank_order
from shoal.blueprint.schedules.table import V_SHAPED, Action, Kind, Pair

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741  (torch's letters)
SETTLED = 2
"""Rounds after which a schedule repeats: the second fills the V of zbv and dualpipev, and the memory of interleaved."""
SETTLED_AROUND = 1
"""Rounds after which the bubble of a schedule repeats whose stages go around."""
IN_ROUNDS = ("interleaved", "zb")
"""Schedules that run in rounds of equal size."""


@lru_cache(maxsize=2**14)
def bubble(word: Schedule, *, num_ranks: int, v: int, num_microbatches: int) -> float:
    """Time that the busiest rank waits in a step, beside the way of one microbatch through all other ranks.

    All stages are alike. 1: the schedule hides nothing of that way, as gpipe and 1f1b.

    >>> (
    ...     bubble("1f1b", num_ranks=4, v=1, num_microbatches=64),
    ...     bubble("interleaved", num_ranks=4, v=2, num_microbatches=8),
    ... )
    (1.0, 0.5)
    """
    if num_ranks == 1:
        return 0.0
    settled = SETTLED if word in V_SHAPED else SETTLED_AROUND
    m, _ = _shortened(word, num_ranks, runnable(word, num_ranks, num_microbatches), settled)
    return _idle_units(word, num_ranks, v, m) / (3 * v * (num_ranks - 1))


@lru_cache(maxsize=2**14)
def in_flight(word: Schedule, rank: int, *, num_ranks: int, v: int, num_microbatches: int) -> float:
    """Microbatches whose activations a rank stores at most, in microbatches of all of its stages.

    >>> [in_flight("1f1b", rank, num_ranks=4, v=1, num_microbatches=64) for rank in range(4)]
    [4.0, 3.0, 2.0, 1.0]
    >>> in_flight("gpipe", 0, num_ranks=4, v=1, num_microbatches=64)
    64.0
    """
    if num_ranks == 1:
        return 1.0
    m, left_out = _shortened(word, num_ranks, runnable(word, num_ranks, num_microbatches), SETTLED)
    stored = _most_stored(word, rank, num_ranks, v, m)
    if left_out:
        more = m // SETTLED if word in IN_ROUNDS else 1
        stored += left_out // more * (_most_stored(word, rank, num_ranks, v, m + more) - stored)
    return min(float(num_microbatches), stored / v)


@lru_cache(maxsize=2**12)
def fetches(word: Schedule, rank: int, *, num_ranks: int, v: int, num_microbatches: int, kept: int) -> dict[int, int]:
    """Stage of a rank → how often it is gathered in a step, if only the `kept` stages that compute next stay gathered.

    >>> fetches("interleaved", 0, num_ranks=2, v=4, num_microbatches=4, kept=3)
    {0: 4, 2: 3, 4: 3, 6: 1}
    """
    m, left_out = _shortened(word, num_ranks, runnable(word, num_ranks, num_microbatches), SETTLED)
    found = _fetches(word, rank, num_ranks, v, m, kept)
    if not left_out:
        return found
    more = m // SETTLED if word in IN_ROUNDS else 1
    longer = _fetches(word, rank, num_ranks, v, m + more, kept)
    return {stage: number + left_out // more * (longer[stage] - number) for stage, number in found.items()}


def _fetches(word: Schedule, rank: int, p: int, v: int, m: int, kept: int) -> dict[int, int]:
    found: dict[int, int] = {}
    coming: list[int] = []  # stages of this rank, the next to compute first
    later: set[int] = set()  # those that are gathered at the next tick
    for slot in reversed([*rank_order(word, rank, p, v, m)]):
        for part in reversed(slot.parts):
            if part.stage in coming:
                coming.remove(part.stage)
            coming.insert(0, part.stage)
        now = set(coming[:kept])
        for stage in later - now:  # not gathered here: the next tick has to
            found[stage] += 1
        found |= {stage: found.get(stage, 0) for stage in now}
        later = now
    return {stage: found[stage] + (stage in later) for stage in sorted(found)}


def runnable(word: Schedule, num_ranks: int, num_microbatches: int) -> int:
    """The number of microbatches, or the next one above it that a schedule can run.

    >>> runnable("interleaved", 4, 9), runnable("dualpipev", 4, 5), runnable("1f1b", 4, 9)
    (12, 8, 9)
    """
    if word == "dualpipev":
        return max(2 * num_ranks, num_microbatches)
    if word in IN_ROUNDS and num_microbatches % num_rounds(num_ranks, num_microbatches):
        return -(-num_microbatches // num_ranks) * num_ranks
    return num_microbatches


def _shortened(word: str, num_ranks: int, m: int, settled: int) -> tuple[int, int]:
    """The microbatches to simulate, those of the first `settled` rounds, and how many that leaves out."""
    rounds = num_rounds(num_ranks, m)
    if rounds <= settled:
        return m, 0
    simulated = settled * (m // rounds if word in IN_ROUNDS else num_ranks)
    return simulated, m - simulated


@lru_cache(maxsize=2**14)
def _most_stored(word: Schedule, rank: int, p: int, v: int, m: int) -> int:
    """The most activations that a rank stores, each of one microbatch on one of its stages."""
    stored = most = 0
    for slot in rank_order(word, rank, p, v, m):
        for _, kind, _ in slot.parts:
            if kind is F:
                stored += 1
                if stored > most:
                    most = stored
            elif kind is not I:
                stored -= 1
    return most


@lru_cache(maxsize=2**12)
def _idle_units(word: Schedule, p: int, v: int, m: int) -> int:
    """Units of time that the busiest rank waits in a step: all ranks compute equally long.

    A microbatch passes 2 p v borders. Border b lies before stage b on its way through the forwards, and border
    2 p v - b is the same on its way back. So a forward of stage s takes it from border s to s + 1. A backward, or the
    input gradient alone, takes it from 2 p v - 1 - s to 2 p v - s. `passed[b m + i]`: when i passed border b.
    """
    passed = [0] * m + [-1] * (2 * p * v * m)  # -1: not yet
    turn = 2 * p * v
    orders = [rank_order(word, rank, p, v, m) for rank in range(p)]
    slots: list[Action | Pair | None] = [next(order) for order in orders]
    free, awake = [0] * p, list(range(p))
    waiting: dict[int, int] = {}  # place in `passed` → the rank that waits for it
    while awake:  # a rank runs until an input is missing, and again when the input is there
        rank = awake.pop()
        slot, end = slots[rank], free[rank]
        while slot is not None:
            parts: tuple[Action, ...] = slot if isinstance(slot, Pair) else (slot,)
            start, length = end, 0
            for stage, kind, number in parts:
                if kind is W:  # its input gradient ran before, on this rank
                    length += 1
                    continue
                need = (stage if kind is F else turn - 1 - stage) * m + number
                length += 2 if kind is B else 1
                if passed[need] < 0:
                    waiting[need] = rank
                    break
                if passed[need] > start:
                    start = passed[need]
            else:
                end = start + length
                for stage, kind, number in parts:
                    if kind is not W:
                        result = (stage + 1 if kind is F else turn - stage) * m + number
                        passed[result] = end
                        if result in waiting:
                            awake.append(waiting.pop(result))
                slot = next(orders[rank], None)
                continue
            break
        slots[rank], free[rank] = slot, end
    return max(free) - 3 * v * m
