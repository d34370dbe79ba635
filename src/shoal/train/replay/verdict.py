"""Say which rank computes wrong, from checksums of the same gradients that several ranks have computed.

    share of rank 2   rank 2: 7f3a, 7f3a     its own samples, twice
                      rank 1: 91c0, 91c0     the same samples on its neighbour, twice
                      rank 0: 91c0           on a third rank
                                             rank 2 reproduces its number, and differs from most: it computes wrong

A pure function. A rank that does not reproduce its own number has computed wrong once. With two ranks that both
reproduce theirs, either may be wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import RunFailed

SHOWN = 3
"""Tensors that a message names."""


class Computed(NamedTuple):
    """Checksums of the gradients of one share, as one rank has computed them."""

    share: int
    """The rank whose samples they are."""
    rank: int
    sums: Mapping[str, int]
    """Parameter → checksum of its gradient."""


@dataclass(frozen=True, slots=True)
class Found:
    """The ranks that differ, and how."""

    once: tuple[int, ...] = ()
    """They did not reproduce their own numbers."""
    always: tuple[int, ...] = ()
    """They reproduce numbers that most others do not get."""
    undecided: tuple[int, ...] = ()
    """Each reproduces its own numbers, and no majority says which is right."""
    agreeing: tuple[int, ...] = ()
    """Ranks that got the other numbers."""
    tensors: tuple[str, ...] = ()


def judge(computed: Sequence[Computed]) -> Found:
    """Find the ranks that compute wrong."""
    once: set[int] = set()
    always: set[int] = set()
    undecided: set[int] = set()
    agreeing: set[int] = set()
    for share in {one.share for one in computed}:
        numbers = _by_rank([one for one in computed if one.share == share])
        changed = {rank for rank, own in numbers.items() if len(set(own)) > 1}
        stable = {rank: own[0] for rank, own in numbers.items() if rank not in changed}
        once |= changed
        if len(set(stable.values())) < 2:
            agreeing |= stable.keys() if changed else set()
            continue
        (most, count), *_ = Counter(stable.values()).most_common(1)
        if count * 2 > len(stable):
            always |= {rank for rank, number in stable.items() if number != most}
            agreeing |= {rank for rank, number in stable.items() if number == most}
        else:
            undecided |= stable.keys()
    wrong = once | always
    undecided = set() if wrong & undecided else undecided
    return Found(
        once=tuple(sorted(once)),
        always=tuple(sorted(always - once)),
        undecided=tuple(sorted(undecided)),
        agreeing=tuple(sorted(agreeing - wrong)),
        tensors=_differing(computed),
    )


def _by_rank(computed: Iterable[Computed]) -> dict[int, list[tuple[int, ...]]]:
    found: dict[int, list[tuple[int, ...]]] = {}
    for one in computed:
        found.setdefault(one.rank, []).append(tuple(one.sums.values()))
    return found


def _differing(computed: Sequence[Computed]) -> tuple[str, ...]:
    """The parameters whose gradients differ in any share, in the order of the model."""
    names: dict[str, None] = {}
    for share in {one.share for one in computed}:
        all_sums = [one.sums for one in computed if one.share == share]
        names |= {name: None for name in all_sums[0] if len({sums.get(name) for sums in all_sums}) > 1}
    return tuple(name for name in computed[0].sums if name in names)


def failure_of(found: Found, *, step: int, agreed_at: int | None, num_ranks: int) -> RunFailed:
    """Put the finding into words. A rank that was wrong once may be right after a restart."""
    of = _tensors(found.tensors)
    good = "an earlier step" if agreed_at is None else f"step {agreed_at} or before"
    resume = f"then shoal train --resume STEP, a checkpoint of {good}"
    last = "no step was compared since the start" if agreed_at is None else f"they were last equal in step {agreed_at}"
    if len(found.once) * 2 > num_ranks or (num_ranks == 2 and len(found.once) == 2):
        what = f"in step {step}, {_ranks(found.once)} did not reproduce their own gradients of {of}; {last}"
        return RunFailed(what, fix="--run.deterministic true; or --run.check_compute 0step", code="T078")
    if found.always:
        compute, its = ("computes", "its") if len(found.always) == 1 else ("compute", "their")
        others = f"the replay of {_ranks(found.agreeing)}"
        what = f"{_ranks(found.always)} {compute} wrong: in step {step}, {its} gradient of {of} differs from {others}"
        return RunFailed(what, fix=f"replace the machine of {_ranks(found.always)}, {resume}", code="T075")
    if found.once:
        its = "its" if len(found.once) == 1 else "their"
        ranks = _ranks(found.once)
        what = f"{ranks} computed wrong once: in step {step}, {its} gradient of {of} differs from {its} replay; {last}"
        failed = RunFailed(what, fix=f"replace the machine of {ranks}, if it happens again", code="T076")
        failed.may_pass = True
        return failed
    what = f"{_ranks(found.undecided)} compute different gradients of {of} from the same samples, in step {step}"
    fix = f"run each machine alone, or with a third, to see which is wrong; {resume}"
    return RunFailed(f"{what}, and each reproduces its own: either may be wrong", fix=fix, code="T077")


def _tensors(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _ranks(ranks: Sequence[int]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
