"""One verdict about a profile: the cause that costs most, its evidence, and the next thing to type.

Causes compete by their cost, the fraction of a step that would be saved without them. Below a tenth none is worth a
change, and the run is bound by computation.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.comm.profile.timer import SAVE
from shoal.observe.profile.partition import BUBBLE, LATE, WHOLE, WIRE, RankParts, axis_of, mean

NOTED = 0.1
"""Fraction of a step: a smaller cost is no verdict. An assumption, as `arrivals.WARN`."""
COMPUTING = ("forward", "backward", "recompute", "optimizer", "other")
"""Parts in which nothing is waited for."""
SMALL_BUCKET = 2**16
"""Bytes of a bucket: a smaller one travels for less than the time of a round trip, half a millisecond at a gigabit a
second. An assumption."""
JITTER = 1.3
"""95th over 50th percentile of the time of a step. An assumption."""

TITLES = {
    "compute": "compute-bound",
    "data": "waiting for data",
    "straggler": "waiting for rank {rank}",
    "link": "link-bound on {axis}",
    "bucket": "buckets too small",
    BUBBLE: "pipeline bubble",
    "recompute": "recomputing activations",
    "saving": "saving checkpoints",
    "jitter": "jitter",
    "cores": "oversubscribed cores",
    "idle": "GPU idle between kernels",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What bounds a run."""

    kind: str
    """A key of `TITLES`."""
    cost: float
    """The fraction of a step."""
    evidence: str
    rank: int | None = None
    axis: str = ""
    next: str = ""
    """What to type."""

    @property
    def title(self) -> str:
        """In words."""
        return TITLES[self.kind].format(rank=self.rank, axis=self.axis)

    def to_mapping(self) -> dict[str, Any]:
        """As JSON values."""
        found = {"kind": self.kind, "title": self.title, "cost": self.cost, "evidence": self.evidence}
        about = {"rank": self.rank} if self.rank is not None else {"axis": self.axis} if self.axis else {}
        return {**found, **about, "next": self.next}


def judge(
    ranks: Sequence[RankParts],
    fix: Callable[[Verdict], str],
    predicted: Mapping[str, float] | None = None,
    *,
    computing: float | None = None,
    exposed: float = 0.0,
) -> Verdict:
    """The verdict. `fix` says what to type; `predicted` has seconds of a step, by part. `computing` and `exposed` are
    the fractions of a step in which the GPU of the first rank computes, and in which it runs communication alone."""
    parts = mean(ranks)
    step = sum(parts.values())
    shares = {name: seconds / step for name, seconds in parts.items()}
    causes = [*_candidates(ranks, shares), *_idle(ranks[0], computing, exposed)]
    found = max(causes, key=lambda each: each.cost, default=None)
    jitter = _jitter(ranks)
    if found is None or found.cost < NOTED:
        found = jitter or _compute(shares)
    elif jitter is not None and jitter.cost > found.cost:
        found = jitter
    return replace(found, evidence=found.evidence + _beside(found, predicted or {}), next=fix(found))


def _beside(found: Verdict, predicted: Mapping[str, float]) -> str:
    """What was predicted of the same part: `; predicted 19%`. Empty: nothing was, as of exchanges of all ranks."""
    name = f"{found.axis}.{WIRE}" if found.kind == "link" else found.kind
    is_predicted = found.kind in ("link", BUBBLE, "recompute") and name in predicted
    return f"; predicted {predicted[name] / sum(predicted.values()):.0%}" if is_predicted else ""


def _candidates(ranks: Sequence[RankParts], shares: Mapping[str, float]) -> Iterator[Verdict]:
    slow_stage = _slow_stage(ranks, shares)
    if slow_stage is not None:
        yield slow_stage
        shares = {**shares, BUBBLE: max(0.0, shares[BUBBLE] - slow_stage.cost * (1 - 1 / len(ranks)))}
    for name, kind, words in (
        ("data", "data", "of a step is spent waiting for batches"),
        (BUBBLE, BUBBLE, "of a step the stages of the pipeline wait for each other"),
        ("recompute", "recompute", "of a step computes activations a second time"),
        (SAVE, "saving", "of a step is spent saving"),
    ):
        share = shares.get(name, 0.0)
        yield Verdict(kind=kind, cost=share, evidence=f"{share:.0%} {words}")
    yield from _links(ranks, shares)
    yield from _late(ranks)
    yield from _cores(ranks)


def _slow_stage(ranks: Sequence[RankParts], shares: Mapping[str, float]) -> Verdict | None:
    """A rank of a pipeline that is busy for longer than the others: they wait for that, and not for the schedule alone.
    None: stages are alike, or the schedule is the larger part of the bubble."""
    if len(ranks) < 2 or not shares.get(BUBBLE):
        return None
    busy = {
        rank.record.rank: sum(seconds for name, seconds in mean([rank]).items() if "." not in name and name != BUBBLE)
        for rank in ranks
    }
    slowest = max(busy, key=busy.__getitem__)
    more = busy[slowest] - statistics.fmean(seconds for rank, seconds in busy.items() if rank != slowest)
    cost = more / statistics.fmean(sum(rank.seconds) / len(rank.steps) for rank in ranks)
    if cost * (1 - 1 / len(ranks)) < shares[BUBBLE] / 2:
        return None
    part, longer = _excess(ranks, slowest)
    evidence = f"rank {slowest} is busy for {more * 1e3:.0f} ms of a step more than the other stages, which wait for it"
    return Verdict(kind="straggler", rank=slowest, cost=cost, evidence=f"{evidence} ({longer * 1e3:.0f} ms in {part})")


def _idle(rank: RankParts, computing: float | None, exposed: float) -> Iterator[Verdict]:
    """The time of a GPU in which no kernel runs, while it computes as far as the parts say. Kernels of communication
    run while a rank waits, which those parts leave out. Only waits that C++ makes, such as those of torch's DDP, are
    within them: communication beyond all waits is one of those."""
    if computing is None:
        return
    parts, step = mean([rank]), sum(rank.seconds) / len(rank.steps)
    of_parts = sum(parts.get(name, 0.0) for name in COMPUTING) / step
    waits = sum(seconds for name, seconds in parts.items() if name == BUBBLE or axis_of(name)) / step
    inside = max(0.0, exposed - waits)
    cost = max(0.0, of_parts - computing - inside)
    also = f", communication that they wait for {inside:.0%}" if inside else ""
    evidence = f"kernels compute {computing:.0%} of a step{also}, and forward, backward and update take {of_parts:.0%}"
    yield Verdict(kind="idle", cost=cost, evidence=f"{evidence}: the main thread queues kernels too slowly")


def _links(ranks: Sequence[RankParts], shares: Mapping[str, float]) -> Iterator[Verdict]:
    by_axis: dict[str, float] = defaultdict(float)
    for name, share in shares.items():
        if name.endswith((f".{WIRE}", f".{WHOLE}")):
            by_axis[axis_of(name)] += share
    for axis, share in by_axis.items():
        is_split = f"{axis}.{WHOLE}" not in shares
        where = "on the wire" if is_split else "in communication (not split: the ranks have no common clock)"
        evidence, kind = f"{axis} waits {share:.0%} of a step {where}", "link"
        sent = ranks[0].record
        if axis == "dp_replicate" and sent.messages > 1 and sent.bytes < SMALL_BUCKET * sent.messages:
            each = f"{sent.bytes / sent.messages / 1e3:.1f} kB"
            evidence, kind = f"{evidence}, for {sent.messages} messages of {each}: each takes a round trip", "bucket"
        yield Verdict(kind=kind, axis=axis, cost=share, evidence=evidence)


def _late(ranks: Sequence[RankParts]) -> Iterator[Verdict]:
    """The rank that the others wait for; or ranks that are late in turns, which is jitter."""
    if len(ranks) < 2:
        return
    total = statistics.fmean(sum(rank.seconds) for rank in ranks)
    costs: dict[int, float] = defaultdict(float)
    waits = {rank.record.rank: rank.late_for for rank in ranks}
    for rank in ranks:
        for last, seconds in rank.late_for.items():
            costs[_first_cause(last, seconds, waits)] += seconds / (len(ranks) - 1) / total
    ordered = sorted(((cost, rank) for rank, cost in costs.items()), reverse=True)
    if not ordered:
        return
    (cost, slowest), *others = ordered
    if not others or cost > 2 * others[0][0]:
        part, more = _excess(ranks, slowest)
        which = f", which spends {more * 1e3:.0f} ms more in {part}" if more > 0 else ""
        evidence = f"the other ranks wait {cost:.0%} of a step for rank {slowest}{which}"
        if part in (SAVE, "data") and more > 0:
            yield Verdict(kind="saving" if part == SAVE else "data", cost=cost, evidence=evidence)
            return
        yield Verdict(kind="straggler", rank=slowest, cost=cost, evidence=evidence)
    else:
        together = sum(cost for cost, _ in ordered)
        yield Verdict(kind="jitter", cost=together, evidence=f"ranks are late in turns, {together:.0%} of a step")


def _first_cause(last: int, seconds: float, waits: Mapping[int, Mapping[int, float]]) -> int:
    """The rank because of which `last` was late: itself, or one that it has waited for first, along another axis. That
    one has waited for none itself; ranks that are late in turns have all waited."""
    seen, cause = {last}, last
    while waits.get(cause):
        following = max(waits[cause], key=waits[cause].__getitem__)
        if following in seen or waits[cause][following] < seconds / 2:
            break
        seen.add(following)
        cause = following
    return cause if sum(waits.get(cause, {}).values()) < seconds / 2 else last


def _excess(ranks: Sequence[RankParts], slowest: int) -> tuple[str, float]:
    """The part in which a rank spends more than the others, and how many seconds of a step more."""
    own = next(rank for rank in ranks if rank.record.rank == slowest)
    others = mean([rank for rank in ranks if rank is not own])
    more = {
        name: seconds - others.get(name, 0.0) for name, seconds in mean([own]).items() if not name.endswith(f".{LATE}")
    }
    name = max(more, key=lambda each: more[each])
    return name, more[name]


def _cores(ranks: Sequence[RankParts]) -> Iterator[Verdict]:
    """Threads that wait for a core, by the kernel's own count."""
    for host in sorted({rank.record.host for rank in ranks if rank.record.device == "cpu"}):
        here = [rank for rank in ranks if rank.record.host == host]
        delays = [rank.delay for rank in here if rank.delay is not None]
        threads, cores = sum(rank.record.threads for rank in here), here[0].record.cores
        cost = statistics.fmean(delays) if delays else NOTED * (threads > cores)
        each = here[0].record.threads
        who = f"{len(here)} rank{'s' * (len(here) > 1)} x {each} thread{'s' * (each > 1)} on {cores} cores"
        waits = f"ranks wait {cost:.0%} of a step for a core" if delays else "more threads than cores"
        whose = "" if threads > cores else "; other programs use them"
        yield Verdict(kind="cores", cost=cost, evidence=f"{waits}: {who}{whose}")


def _jitter(ranks: Sequence[RankParts]) -> Verdict | None:
    """Steps of different length, without the time of saves."""
    each = [
        [seconds - step.get(SAVE, 0.0) for seconds, step in zip(rank.seconds, rank.steps, strict=True)]
        for rank in ranks
    ]
    steps = sorted(statistics.fmean(of_step) for of_step in zip(*each, strict=True))
    middle, high = statistics.median(steps), percentile(steps, 0.95)
    if high <= JITTER * middle:
        return None
    average = statistics.fmean(steps)
    evidence = f"steps take {middle * 1e3:.0f} ms (median) and {high * 1e3:.0f} ms (95th percentile)"
    return Verdict(kind="jitter", cost=(average - middle) / average, evidence=evidence)


def _compute(shares: Mapping[str, float]) -> Verdict:
    share = sum(shares.get(name, 0.0) for name in ("forward", "backward", "optimizer"))
    evidence = f"{share:.0%} of a step is forward, backward and update"
    return Verdict(kind="compute", cost=share, evidence=f"{evidence}; no other cause takes {NOTED:.0%}")


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that is not below this part of the values.

    >>> percentile([1.0, 2.0, 3.0, 4.0, 5.0], 0.95), percentile([1.0, 2.0, 3.0, 4.0], 0.5)
    (5.0, 2.0)
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-part * len(ordered) // 1) - 1))]
