"""Cut the time of every step into parts that add to the whole: waits by axis, and each wait by its reason.

A wait ends when the last rank has entered the collective and its bytes have travelled. Ranks of one host share a clock,
so the two can be separated:

    rank 0   ──────●▒▒▒▒▒▒▒▒▒▒▒▒░░░░   ▒ late: for rank 1, which has not entered yet     ░ wire: bytes travel
    rank 1   ──────────────────●░░░░

Between the stages of a pipeline, `late` is the bubble: a stage has nothing to compute until another one sends. That
holds for the end of a step as well, where the first stage is still in its last backward. Ranks of several hosts have no
common clock: their waits stay whole. An evaluation between two steps is no part of either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.comm.profile.timer import EVALUATION, Span
from shoal.observe.profile.record import RankRecord

BUBBLE = "bubble"
LATE, WIRE, WHOLE = "late", "wire", "wait"
"""Kinds of a wait: for a rank, for bytes, and not split. A part is called `tp.late`."""
ORDER = ("data", "forward", "backward", "recompute", BUBBLE, "optimizer", "save", "other")
"""Parts, in the order in which they are shown; waits come before the optimizer."""
AXES = ("tp", "cp", "ep", "pp", "dp_shard", "dp_replicate", "world")


@dataclass(slots=True)
class RankParts:
    """The time of one rank, by part."""

    record: RankRecord
    steps: list[dict[str, float]] = field(default_factory=list)
    """Part → seconds, for each step."""
    seconds: list[float] = field(default_factory=list)
    """Of each step."""
    late_for: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Rank → seconds for which this rank has waited for it."""

    @property
    def total(self) -> dict[str, float]:
        """Part → seconds, over all steps."""
        found: dict[str, float] = defaultdict(float)
        for step in self.steps:
            for name, seconds in step.items():
                found[name] += seconds
        return dict(found)

    @property
    def delay(self) -> float | None:
        """The fraction of the time in which it could have run and had no core; None: it is not known."""
        if self.record.device != "cpu":  # its steps are those of a stream
            return None
        delays = [step.delay for step in self.record.steps if step.delay is not None]
        whole = sum(step.spans[-1].end - step.spans[-1].begin for step in self.record.steps)  # with evaluations
        return sum(delays) / whole if delays and len(delays) == len(self.seconds) else None


def partition(records: Sequence[RankRecord]) -> list[RankParts]:
    """The parts of every rank."""
    arrivals = _arrivals(records)
    return [_of_rank(record, records, arrivals) for record in records]


def _of_rank(record: RankRecord, records: Sequence[RankRecord], arrivals: Mapping[str, dict[int, int]]) -> RankParts:
    found = RankParts(record)
    for step in record.steps:
        parts: dict[str, float] = defaultdict(float)
        left_out = sum(span.own for span in step.spans if span.name == EVALUATION)
        for span in (span for span in step.spans if span.name != EVALUATION):
            for name, nanoseconds, last in _cut(span, record, records, arrivals):
                parts[name] += nanoseconds / 1e9
                if last is not None:
                    found.late_for[last] += nanoseconds / 1e9
        found.steps.append(dict(parts))
        found.seconds.append((step.spans[-1].end - step.spans[-1].begin - left_out) / 1e9)
    return found


def _cut(
    span: Span, record: RankRecord, records: Sequence[RankRecord], arrivals: Mapping[str, dict[int, int]]
) -> Iterator[tuple[str, float, int | None]]:
    """Yield (part, nanoseconds, the rank that was waited for)."""
    if not span.is_wait:
        yield span.name, span.own, None
        return
    arrived = arrivals.get(span.key or "", {})
    if len(arrived) < 2 or len({records[rank].host for rank in arrived}) > 1:
        yield f"{span.name}.{WHOLE}", span.own, None
        return
    when, last = max((when, rank) for rank, when in arrived.items())
    late = min(max(0, min(span.end, when) - span.begin), span.own) if last != record.rank else 0
    if late and _is_bubble(span.name, record, records[last]):
        yield BUBBLE, late, None
    elif late:
        yield f"{span.name}.{LATE}", late, last
    yield f"{span.name}.{WIRE}", span.own - late, None


def _is_bubble(axis: str, waiting: RankRecord, last: RankRecord) -> bool:
    """Whether a wait is for another stage of the pipeline."""
    is_between = axis == "pp" or waiting.place.get("pp") != last.place.get("pp")
    return "pp" in waiting.place and is_between


def _arrivals(records: Iterable[RankRecord]) -> dict[str, dict[int, int]]:
    """Collective or message → rank → when it was entered."""
    found: dict[str, dict[int, int]] = defaultdict(dict)
    for record in records:
        for key, when in record.entered.items():
            found[key][record.rank] = when
    return found


def mean(ranks: Sequence[RankParts]) -> dict[str, float]:
    """Part → seconds of a step, the mean over steps and ranks; in the order in which they are shown."""
    found: dict[str, float] = defaultdict(float)
    for rank in ranks:
        for name, seconds in rank.total.items():
            found[name] += seconds / len(rank.steps) / len(ranks)
    return in_order(found)


def in_order(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts in the order in which they are shown."""
    return {name: parts[name] for name in sorted(parts, key=_place)}


def _place(name: str) -> tuple[int, int, str]:
    if name in ORDER:
        return ORDER.index(name), 0, ""
    axis = axis_of(name)
    return ORDER.index(BUBBLE), 1 + (AXES.index(axis) if axis in AXES else len(AXES)), name


def axis_of(name: str) -> str:
    """The axis of a wait; empty: the part is no wait.

    >>> axis_of("tp.late"), axis_of("data")
    ('tp', '')
    """
    return name.rpartition(".")[0]
