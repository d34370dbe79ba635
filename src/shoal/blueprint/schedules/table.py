"""A pipeline schedule as a value: the action of each rank at each tick. Print it, parse it, validate it, compare it.

Torch stores the order of a schedule inside the object that runs it, which needs stages, which need a process group. A
`ScheduleTable` needs none of them. The planner counts its bubble, the report draws it, and tests compare it
with the order that torch runs. Its actions are spelled as in torch: `2F0` is the forward of microbatch 0 on stage 2.

A row is a tick. The inputs of an action come from earlier ticks, so a valid table cannot deadlock. Ticks give an order,
not a duration: `simulate` computes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import NamedTuple

from shoal.errors import ShoalError

V_SHAPED = ("zbv", "dualpipev")
"""Schedules with stages that go down the ranks and back: 0 1 2 3 3 2 1 0. All others go around: 0 1 2 3 0 1 2 3."""


class Kind(Enum):
    """The kind of an action. B is I and W in one."""

    F = "F"  # forward
    B = "B"  # backward, whole
    I = "I"  # backward: gradient of the stage's input, which the previous stage waits for  # noqa: E741
    W = "W"  # backward: gradient of the stage's weights, which no other stage waits for

    __hash__ = object.__hash__  # that of Enum is a function of Python, and most of the time to make a schedule


class Action(NamedTuple):
    """One computation of one stage on one microbatch.

    >>> print(Action(2, Kind.F, 0), Action.parse("7W12"))
    2F0 7W12
    """

    stage: int
    kind: Kind
    microbatch: int

    @classmethod
    def parse(cls, text: str) -> Action:
        """The reverse of `str`."""
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
        if not match:
            raise ShoalError(
                f"{text!r} is not an action", fix="stage, one of F B I W, microbatch: for example 2F0", code="P055"
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @property
    def parts(self) -> tuple[Action, ...]:
        """Itself: an action is a slot with one part."""
        return (self,)

    @property
    def results(self) -> tuple[Action, ...]:
        """Its results, named by the smallest actions that give them: B gives the results of I and W."""
        if self.kind is not Kind.B:
            return (self,)
        return self._replace(kind=Kind.I), self._replace(kind=Kind.W)

    def needs(self, num_stages: int) -> tuple[Action, ...]:
        """The results that it needs before it can run."""
        if self.kind is Kind.F:
            return (self._replace(stage=self.stage - 1),) if self.stage else ()
        if self.kind is Kind.W:
            return (self._replace(kind=Kind.I),)
        forward = self._replace(kind=Kind.F)
        if self.stage == num_stages - 1:
            return (forward,)
        return forward, Action(self.stage + 1, Kind.I, self.microbatch)


class Pair(NamedTuple):
    """A forward and a backward of different microbatches that a rank may run at the same time.

    >>> print(Pair(Action(0, Kind.F, 8), Action(7, Kind.B, 0)))
    (0F8;7B0)OVERLAP_F_B
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def parts(self) -> tuple[Action, ...]:
        """The forward, then the backward: the order in which torch runs them."""
        return self.forward, self.backward


Slot = Action | Pair | None
"""The content of a tick on one rank. None: the rank waits."""


@dataclass(frozen=True, kw_only=True)
class ScheduleTable:
    """Rows of ticks, columns of ranks. `make_schedule` builds the legal ones, `parse` reads any.

    >>> print(
    ...     ScheduleTable.parse('''
    ... 1f1b on 2 ranks, v=1, 2 microbatches
    ... tick | rank0  rank1
    ...    0 | 0F0    .
    ...    1 | 0F1    1F0
    ...    2 | .      1B0
    ...    3 | 0B0    1F1
    ...    4 | .      1B1
    ...    5 | 0B1    .
    ... ''').order(0)[2]
    ... )
    0B0
    """

    word: str
    num_ranks: int
    v: int
    """Stages per rank."""
    num_microbatches: int
    slots: tuple[tuple[Slot, ...], ...]
    """Per rank, its slots tick by tick; all ranks have the same number of ticks."""

    @property
    def num_stages(self) -> int:
        """The stages of all ranks."""
        return self.num_ranks * self.v

    @property
    def num_ticks(self) -> int:
        """The ticks from the first forward to the last backward."""
        return len(self.slots[0])

    @property
    def stage_rank(self) -> tuple[int, ...]:
        """The rank that owns each stage."""
        return stage_ranks(self.word, num_ranks=self.num_ranks, v=self.v)

    def order(self, rank: int) -> tuple[Action | Pair, ...]:
        """The actions of a rank in order: its column without the empty slots."""
        return tuple(slot for slot in self.slots[rank] if slot is not None)

    def ticks(self) -> Iterator[tuple[int, int, Action | Pair]]:
        """All slots as (tick, rank, slot), in an order in which they can run."""
        for tick, row in enumerate(zip(*self.slots, strict=True)):
            yield from ((tick, rank, slot) for rank, slot in enumerate(row) if slot is not None)

    def __str__(self) -> str:
        return "\n".join([self.title, *_rows(self, range(self.num_ticks), {})])

    @property
    def title(self) -> str:
        """The first line of its text."""
        return f"{self.word} on {self.num_ranks} ranks, v={self.v}, {self.num_microbatches} microbatches"

    @classmethod
    def parse(cls, text: str) -> ScheduleTable:
        """The reverse of `str`, for any table, also an invalid one."""
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        match = re.fullmatch(r"(\w+) on (\d+) ranks, v=(\d+), (\d+) microbatches", lines[0] if lines else "")
        if not match:
            raise ShoalError(
                f"{lines[0] if lines else text!r} is not the first line of a schedule",
                fix="for example: 1f1b on 2 ranks, v=1, 4 microbatches",
                code="P055",
            )
        num_ranks = int(match[2])
        rows = [[_read_slot(cell) for cell in line.partition("|")[2].split()] for line in lines[2:]]
        for row, line in zip(rows, lines[2:], strict=True):
            if len(row) != num_ranks:
                what = f"a row must have {num_ranks} slots, one per rank, got {len(row)}: {line}"
                raise ShoalError(what, fix="one slot per rank; . to wait", code="P055")
        columns = tuple(tuple(row[rank] for row in rows) for rank in range(num_ranks))
        return cls(word=match[1], num_ranks=num_ranks, v=int(match[3]), num_microbatches=int(match[4]), slots=columns)

    def validate(self) -> None:
        """Raise unless every action runs once, on its own rank and after its inputs. The message shows the tick."""
        faults = sorted(_faults(self), key=lambda fault: fault.tick)
        if not faults:
            return
        first = faults[0]
        around = range(max(0, first.tick - 3), min(self.num_ticks, first.tick + 4))
        marks = {fault.tick: fault.text for fault in reversed(faults)}
        more = [f"... and {len(faults) - 1} more" for _ in faults[1:2]]
        raise ShoalError(
            "\n".join([f"{self.title}: cannot run", *_rows(self, around, marks), *more]),
            fix=first.fix,
            code="P056",
        )


def stage_ranks(word: str, *, num_ranks: int, v: int) -> tuple[int, ...]:
    """The rank that owns each stage of a schedule.

    >>> stage_ranks("interleaved", num_ranks=3, v=2), stage_ranks("zbv", num_ranks=3, v=2)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    there, back = range(num_ranks), range(num_ranks - 1, -1, -1)
    return tuple(rank for chunk in range(v) for rank in (back if word in V_SHAPED and chunk % 2 else there))


def align(orders: Sequence[Sequence[Action | Pair]], *, num_stages: int) -> tuple[tuple[Slot, ...], ...]:
    """Columns of a table from the order of each rank: every action at the first tick at which it can run."""
    columns: list[list[Slot]] = [[] for _ in orders]
    places = [0] * len(orders)
    known: set[Action] = set()
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        learned: list[Action] = []
        for rank, order in enumerate(orders):
            slot = order[places[rank]] if places[rank] < len(order) else None
            ready = slot is not None and all(need in known for part in slot.parts for need in part.needs(num_stages))
            columns[rank].append(slot if ready else None)
            places[rank] += ready
            learned += (result for part in slot.parts for result in part.results) if slot and ready else ()
        if not learned:
            raise _deadlock(orders, places, known, num_stages)
        known.update(learned)
    return tuple(map(tuple, columns))


class _Fault(NamedTuple):
    tick: int
    text: str
    fix: str


def _faults(table: ScheduleTable) -> Iterator[_Fault]:
    owners, last = table.stage_rank, max(0, table.num_ticks - 1)
    ran: dict[Action, tuple[int, Action]] = {}  # a result → its tick and its action
    for tick, rank, slot in table.ticks():
        for action in slot.parts:
            if action.stage >= table.num_stages or action.microbatch >= table.num_microbatches:
                legal = f"stages 0 to {table.num_stages - 1}, microbatches 0 to {table.num_microbatches - 1}"
                yield _Fault(tick, f"{action} does not exist", legal)
                continue
            if rank != owners[action.stage]:
                owner = owners[action.stage]
                yield _Fault(tick, f"{action} must be on rank {owner}, got rank {rank}", f"rank {owner}")
            for result in action.results:
                if result in ran:
                    earlier = ran[result]
                    yield _Fault(tick, f"{action} repeats {earlier[1]} of tick {earlier[0]}", "remove one of them")
                ran.setdefault(result, (tick, action))
    for tick, _, slot in table.ticks():
        for action in slot.parts:
            for need in action.needs(table.num_stages):
                when, source = ran.get(need, (None, need))
                if when is None:
                    yield _Fault(tick, f"{action} needs {source}, which never runs", f"add {source}")
                elif when >= tick:
                    text = f"{action} needs {source}, which runs at tick {when}"
                    yield _Fault(tick, text, f"{action} at tick {when + 1} or later, or {source} before tick {tick}")
    for stage, kind, number in product(
        range(table.num_stages), (Kind.F, Kind.I, Kind.W), range(table.num_microbatches)
    ):
        if (missing := Action(stage, kind, number)) not in ran:
            yield _Fault(last, f"{missing} never runs", f"add {missing}")


def _deadlock(
    orders: Sequence[Sequence[Action | Pair]], places: Sequence[int], known: set[Action], num_stages: int
) -> ShoalError:
    waiting = []
    for rank, (order, place) in enumerate(zip(orders, places, strict=True)):
        if place < len(order):
            lacks = [n for part in order[place].parts for n in part.needs(num_stages) if n not in known]
            waiting.append(f"rank {rank} waits at {order[place]} for {', '.join(map(str, lacks))}")
    return ShoalError(
        "the schedule deadlocks: " + "; ".join(waiting), fix="run the missing actions earlier", code="P056"
    )


def _read_slot(cell: str) -> Slot:
    if cell == ".":
        return None
    if match := re.fullmatch(r"\((.+);(.+)\)OVERLAP_F_B", cell):
        return Pair(Action.parse(match[1]), Action.parse(match[2]))
    return Action.parse(cell)


def _rows(table: ScheduleTable, ticks: Iterable[int], marks: Mapping[int, str]) -> Iterator[str]:
    cells = [[f"rank{rank}", *(str(slot or ".") for slot in column)] for rank, column in enumerate(table.slots)]
    widths = [max(map(len, column)) for column in cells]
    for row in (0, *(tick + 1 for tick in ticks)):
        label = f"{row - 1:>4}" if row else "tick"
        line = "  ".join(column[row].ljust(width) for column, width in zip(cells, widths, strict=True))
        mark = f"    <-- ERROR HERE: {marks[row - 1]}" if row - 1 in marks else ""
        yield f"{label} | {line}{mark}".rstrip()
