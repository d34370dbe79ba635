"""The pipeline schedules: one small pure function each, with its small case drawn above it, and the rules of each.

Torch has these schedules inside the classes that run them (`torch.distributed.pipelining.schedules`). Here each is the
list of actions of one rank, in exactly torch's order, made without torch. `make_schedule` puts the ranks side by side
in a `ScheduleTable`. A test compares every schedule with torch's own objects, and with the order that torch ran.

In the drawings a rank is a line, time goes to the right, and `.` is waiting. p is the number of ranks, m the number of
microbatches, v the stages per rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import count, islice
from typing import get_args

from shoal.blueprint.plan import VIRTUAL_STAGES, Schedule
from shoal.blueprint.schedules.table import Action, Kind, Pair, ScheduleTable, align
from shoal.errors import Problem, listed, nearest, raise_if

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741  (torch's letters)


@lru_cache(maxsize=256)
def make_schedule(word: Schedule, *, num_ranks: int, v: int, num_microbatches: int) -> ScheduleTable:
    """The table of a schedule.

    >>> print(make_schedule("1f1b", num_ranks=2, v=1, num_microbatches=2))
    1f1b on 2 ranks, v=1, 2 microbatches
    tick | rank0  rank1
       0 | 0F0    .
       1 | 0F1    1F0
       2 | .      1B0
       3 | 0B0    1F1
       4 | .      1B1
       5 | 0B1    .
    """
    raise_if(check_schedule(word, num_ranks=num_ranks, v=v, num_microbatches=num_microbatches))
    orders = [list(rank_order(word, rank, num_ranks, v, num_microbatches)) for rank in range(num_ranks)]
    return ScheduleTable(
        word=word,
        num_ranks=num_ranks,
        v=v,
        num_microbatches=num_microbatches,
        slots=align(orders, num_stages=num_ranks * v),
    )


def rank_order(word: Schedule, rank: int, num_ranks: int, v: int, num_microbatches: int) -> Iterator[Action | Pair]:
    """The actions of one rank in order, of a schedule that `check_schedule` accepts.

    >>> print(*rank_order("1f1b", 0, 2, 1, 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    """
    return _ORDERS[word](rank, num_ranks, v, num_microbatches)


# ---- rules ----------------------------------------------------------------------------------------------------------


def check_schedule(word: str, *, num_ranks: int, v: int, num_microbatches: int) -> list[Problem]:
    """Problems of a schedule with its ranks, stages and microbatches. Empty: it can be made.

    Torch rejects some of them only when the run starts, and runs others with idle ranks. One microbatch is legal
    wherever torch can run it: that is plain model parallelism, one rank at a time.

    >>> print(*check_schedule("interleaved", num_ranks=4, v=2, num_microbatches=9))
    interleaved on pp=4 ranks cannot run 9 microbatches: they do not fall into 2 equal rounds [P020]
        fix: 8, 10 or 12 microbatches: change data.global_batch or mb
    """
    if word not in get_args(Schedule):
        return [
            Problem(
                "P006", f"{word!r} is not a schedule", nearest(word, get_args(Schedule)) or listed(get_args(Schedule))
            )
        ]
    counts = {"pp": num_ranks, "v": v, "microbatches": num_microbatches}
    problems = [
        Problem("P005", f"{key} must be at least 1, got {n!r}", f"{key}=1") for key, n in counts.items() if n < 1
    ]
    if problems:
        return problems
    if v != (legal_v := VIRTUAL_STAGES.get(word, v)):
        what = f"{word} must have v={legal_v} stages per rank, got v={v}"
        problems.append(Problem("P019", what, f"v={legal_v}, or interleaved"))
    return [*problems, *check_microbatches(word, num_ranks, num_microbatches)]


def check_microbatches(word: str, num_ranks: int, num_microbatches: int) -> list[Problem]:
    """The problem of a schedule with its number of microbatches, if there is one."""
    if not (why := _too_few_or_uneven(word, num_ranks, num_microbatches)):
        return []
    what = f"{word} on pp={num_ranks} ranks cannot run {num_microbatches} microbatches: {why}"
    fix = (
        f"{listed(legal_microbatches(word, num_ranks, num_microbatches))} microbatches: change data.global_batch or mb"
    )
    return [Problem("P020", what, fix)]


def _too_few_or_uneven(word: str, num_ranks: int, num_microbatches: int) -> str:
    """The reason why this number of microbatches is illegal; empty: it is legal."""
    if word == "dualpipev":
        least = 2 * num_ranks
        return f"it needs one for each of its 2 x pp = {least} stages" if num_microbatches < least else ""
    if 1 < num_microbatches < num_ranks:
        return f"with fewer than {num_ranks}, some ranks would always wait"
    rounds = num_rounds(num_ranks, num_microbatches)
    if word in ("interleaved", "zb") and num_microbatches % rounds:
        return f"they do not fall into {rounds} equal rounds"
    return ""


@lru_cache(maxsize=4096)  # a search calls it for thousands of plans
def legal_microbatches(word: str, num_ranks: int, num_microbatches: int) -> list[int]:
    """Legal numbers of microbatches: the largest below, and the next two above."""
    below = (m for m in range(num_microbatches - 1, 0, -1) if not _too_few_or_uneven(word, num_ranks, m))
    above = (m for m in count(num_microbatches + 1) if not _too_few_or_uneven(word, num_ranks, m))
    return [*islice(below, 1), *islice(above, 2)]


def num_rounds(num_ranks: int, num_microbatches: int) -> int:
    """The number of groups of microbatches in interleaved and zb; a group passes all stages of a rank in turn."""
    return max(1, num_microbatches // num_ranks)


# ---- one stage per rank ---------------------------------------------------------------------------------------------


def _gpipe(rank: int, p: int, v: int, m: int) -> Iterator[Action]:
    # rank 0   F0 F1 F2 F3 .  .  B0 B1 B2 B3       every forward, then every backward
    # rank 1   .  F0 F1 F2 F3 B0 B1 B2 B3 .
    yield from (Action(rank, F, i) for i in range(m))
    yield from (Action(rank, B, i) for i in range(m))


def _one_f_one_b(rank: int, p: int, v: int, m: int) -> Iterator[Action]:
    # rank 0   F0 F1 .  B0 F2 B1 F3 B2 .  B3       as few forwards ahead as keep the last rank busy,
    # rank 1   .  F0 B0 F1 B1 F2 B2 F3 B3 .        then in turn
    ahead = min(m, p - 1 - rank)
    yield from (Action(rank, F, i) for i in range(ahead))
    for i in range(m):
        if i + ahead < m:
            yield Action(rank, F, i + ahead)
        yield Action(rank, B, i)


# ---- v stages per rank, going around --------------------------------------------------------------------------------


def _looped(rank: int, p: int, v: int, m: int) -> Iterator[Action]:
    # rank 0   0F0 0F1 2F0 2F1 .   .   2B1 2B0 0B1 0B0     gpipe stage by stage; backwards last microbatch first
    # rank 1   .   1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0 .
    stages = range(rank, p * v, p)
    yield from (Action(stage, F, i) for stage in stages for i in range(m))
    yield from (Action(stage, B, i) for stage in reversed(stages) for i in reversed(range(m)))


def _interleaved(rank: int, p: int, v: int, m: int) -> Iterator[Action]:
    # rank 0   0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3    1f1b, where each round of
    # rank 1   .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .      microbatches passes all stages
    per_round = m // num_rounds(p, m)
    ahead = min(v * m, (v - 1) * per_round + 2 * (p - 1 - rank))
    forward, backward = _in_rounds(rank, p, v, m, F), _in_rounds(rank, p, v, m, B)
    yield from forward[:ahead]
    for i, action in enumerate(backward):
        yield from forward[ahead + i : ahead + i + 1]
        yield action


def _zb(rank: int, p: int, v: int, m: int) -> Iterator[Action]:
    # rank 0   F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 I3 W3          1f1b with the backward cut in two: other ranks wait for
    # rank 1   .  F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3          I alone, and W fills the idle time
    per_round = m // num_rounds(p, m)
    ahead = min(v * m, (v - 1) * per_round + (p - 1 - rank))
    forward, inputs, weights = (_in_rounds(rank, p, v, m, kind) for kind in (F, I, W))
    yield from forward[:ahead]
    for i, action in enumerate(inputs):
        yield from forward[ahead + i : ahead + i + 1]
        yield action
        yield from weights[max(0, i - rank) : max(0, i - rank + 1)]
    yield from weights[max(0, len(inputs) - rank) :]


def _in_rounds(rank: int, p: int, v: int, m: int, kind: Kind) -> list[Action]:
    """All actions of one kind of a rank: microbatches in rounds, and in a round one stage after the other."""
    per_round = m // num_rounds(p, m)
    stages = range(rank, p * v, p) if kind is F else range(rank + p * (v - 1), -1, -p)
    firsts = range(0, m, per_round)
    return [Action(stage, kind, first + i) for first in firsts for stage in stages for i in range(per_round)]


# ---- two stages per rank, in a V: the last rank has both middle stages, rank 0 the first and the last ----------------


class _Script:
    """The actions of a rank, appended one at a time; each kind of each stage takes the microbatches in order."""

    def __init__(self) -> None:
        self.lines: list[Action | Pair] = []
        self.done: Counter[tuple[int, Kind]] = Counter()
        self.deferred: deque[Action] = deque()  # weight gradients whose input gradients have run, oldest first

    def add(self, stage: int, *kinds: Kind) -> None:
        self.lines += [self._next(stage, kind) for kind in kinds]

    def add_pair(self, *, forward: int, backward: int) -> None:
        self.lines.append(Pair(self._next(forward, F), self._next(backward, B)))

    def add_deferred(self) -> None:
        if self.deferred:
            self.lines.append(self.deferred.popleft())

    def _next(self, stage: int, kind: Kind) -> Action:
        counted = stage, I if kind is B else kind
        number = self.done[counted]
        self.done[counted] = number + 1
        if kind is B:
            self.done[stage, W] += 1
        if kind is I:
            self.deferred.append(Action(stage, W, number))
        return Action(stage, kind, number)


def _zbv(rank: int, p: int, v: int, m: int) -> Iterator[Action | Pair]:
    # rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
    # rank 1   .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    down, up = rank, 2 * p - 1 - rank  # the stages of this rank: on the way down the V, and on the way up
    full = max(m, 2 * p - 1)  # with fewer microbatches, the order is that of `full` without the missing ones
    script = _Script()
    for _ in range(2 * (p - rank) - 1):
        script.add(down, F)
    for _ in range(rank):
        script.add(up, F)
        script.add(down, F)
    for _ in range(p - rank):
        script.add(up, F, I, W)
    while script.done[up, F] < full:
        if script.done[down, F] < full:
            script.add(down, F)
        script.add(down, I, W)
        script.add(up, F, I, W)
    for _ in range(rank):
        script.add(down, I)
        script.add(up, I)
    for _ in range(p - rank):
        script.add(down, I, W)
    for stage in (up, down):
        while script.done[stage, W] < script.done[stage, I]:
            script.add(stage, W)
    yield from (line for line in script.lines if all(part.microbatch < m for part in line.parts))


def _dualpipev(rank: int, p: int, v: int, m: int) -> Iterator[Action | Pair]:
    # rank 0 of 2; & joins a pair that may overlap:
    #   0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3&3B1 3F2&0B0 3B2 3F3&0B1 3B3 0I2 0W2 0I3 0W3
    down, up = rank, 2 * p - 1 - rank
    before, after = p - 1 - rank, rank + 1  # ranks below this one on the V; ranks above it, with itself
    script = _Script()
    for _ in range(2 * before):
        script.add(down, F)
    for _ in range(after):
        script.add(down, F)
        script.add(up, F)
    for _ in range(before):
        script.add(up, I)
        script.add_deferred()
        script.add(up, F)
    for i in range(m - 2 * p + after):
        if i == 0 and not before:  # the turn of the V: apart, the backward starts its way up sooner
            script.add(down, F)
            script.add(up, B)
        else:
            script.add_pair(forward=down, backward=up)
        script.add_pair(forward=up, backward=down)
    for _ in range(before):
        script.add(up, B)
        script.add_pair(forward=up, backward=down)
    for i in range(2 * after):  # whole backwards first, then input gradients alone
        script.add((up, down)[i % 2], B if i < after else I)
    for _ in range(before):
        script.add_deferred()
        script.add(down, I)
    while script.deferred:
        script.add_deferred()
    yield from script.lines


_Order = Callable[[int, int, int, int], Iterator[Action | Pair]]
_ORDERS: Mapping[str, _Order] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "looped": _looped,
    "interleaved": _interleaved,
    "zb": _zb,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
