"""One verdict over the ranks of two hosts, from what each host reports: through JSON, with clocks of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from shoal.comm.heartbeat.ticket import Ticket
from shoal.launch.failure import Failure
from shoal.launch.watch.all_hosts import AllHosts
from shoal.launch.watch.hang_thresholds import Thresholds
from shoal.launch.watch.host_report import MOST, MOST_BEATS, StallReporter, plain_beats
from shoal.launch.watch.reading import ProcessState, Reading
from shoal.launch.watch.verdict import Verdict, verdict_from

LIMITS = Thresholds(600.0)
RUNS = ProcessState()


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.launch.watch.all_hosts.REST", 0.0)


def ticket(number: int, operation: str = "all_reduce", size: int = 8, *, done: bool = False) -> dict[str, Any]:
    return asdict(Ticket("1", number, operation, ("Float",), ((size,),), 0, done))


def beat(entered: int, completed: int, *, ranks: tuple[int, ...] = (0, 1), **others: Any) -> dict[str, Any]:
    """A beat of a rank in group 1."""
    state = {"counters": {"gloo/1": (entered, completed)}, "phase": "step", "step": 9, "beat": 1.0, "total": 3}
    tickets = [ticket(entered)] if entered > completed else []
    return {**state, "median": 0.01, "groups": {"1": ("dp", ranks)}, "tickets": tickets, **others}


class Launcher:
    """The launcher of one host, whose clock is its own. What it sends is encoded as on its way."""

    def __init__(self, name: str, to: AllHosts, *, clock: float) -> None:
        self.name, self.to, self.clock, self.since = name, to, clock, clock
        self.sent: list[dict[str, Any]] = []
        self.reporter = StallReporter(self.send)

    def send(self, report: dict[str, Any]) -> None:
        self.sent.append(json.loads(json.dumps(report)))
        self.to.note(self.name, self.sent[-1])

    def look(self, beats: Mapping[int, dict[str, Any]], state: ProcessState = RUNS, age: float = 0.0) -> None:
        still = self.clock - self.since
        now = {rank: (Reading.parse(each, age=age, still=still), state) for rank, each in beats.items()}
        self.reporter.look(self.clock, beats, now)

    def wait(self, seconds: float, beats: Mapping[int, dict[str, Any]], **others: Any) -> None:
        """Look five times a second."""
        for _ in range(round(5 * seconds)):
            self.clock += 0.2
            self.look(beats, **others)


@pytest.mark.parametrize(
    ("own", "others", "seconds", "found"),
    [
        ({}, {}, 2.8, None),
        ({}, {}, 4.0, ("never_entered", False)),
        ({}, {}, 5.8, ("never_entered", True)),
        ({}, {"state": ProcessState(busy=0.9)}, 5.8, ("never_entered", False)),
        ({"phase": "data"}, {}, 5.8, ("never_entered", False)),
        ({"phase": "data"}, {}, 580.0, ("never_entered", True)),
        ({"phase": "save"}, {}, 5.8, None),
        ({"phase": "evaluation"}, {}, 40.0, ("never_entered", False)),
        ({}, {"state": ProcessState(letter="D", wchan="nfs_wait")}, 4.0, ("kernel", False)),
        ({}, {"age": 4.0}, 5.8, ("gil", True)),
        ({"counters": {"gloo/1": (115, 114)}, "tickets": []}, {"age": 4.0}, 5.8, ("gil", True)),
        ({}, {"state": ProcessState(letter="T", stopped=2.1)}, 2.6, ("stopped", True)),
        ({}, {"state": ProcessState(letter="t", is_traced=True)}, 40.0, None),
    ],
)
def test_a_rank_alone_on_its_host_is_named_while_another_host_waits_for_it(
    own: dict[str, Any], others: dict[str, Any], seconds: float, found: tuple[str, bool] | None
) -> None:
    ranks = AllHosts()
    a, b = Launcher("a", ranks, clock=7.0), Launcher("b", ranks, clock=9e5)
    a.wait(seconds, {0: beat(118, 117)})
    assert ranks.verdict(["a", "b"], LIMITS) is None  # host b may be at work
    b.wait(seconds, {1: beat(117, 117, **own)}, **others)
    said = ranks.verdict(["a", "b"], LIMITS)
    assert (None if said is None else (said.kind, said.is_final)) == found
    if said is not None:
        assert (said.rank, said.waiting, str(said.call)) == (1, (0,), "all_reduce #118 of dp (float32[8])")
        assert verdict_from(json.loads(json.dumps(asdict(said)))) == said
    assert ranks.verdict(["a", "b"], LIMITS) is None  # nothing new


def test_two_hosts_with_two_ranks_each() -> None:
    ranks, all_ranks = AllHosts(), (0, 1, 2, 3)
    a, b = Launcher("a", ranks, clock=7.0), Launcher("b", ranks, clock=0.0)
    a.wait(4.0, {rank: beat(118, 117, ranks=all_ranks) for rank in (0, 1)})
    b.wait(4.0, {2: beat(118, 117, ranks=all_ranks), 3: beat(117, 117, ranks=all_ranks)})
    found = ranks.verdict(["a", "b"], LIMITS)
    assert found is not None
    assert (found.kind, found.rank, found.waiting) == ("never_entered", 3, (0, 1, 2))


@pytest.mark.parametrize("odd", [ticket(118, "broadcast"), ticket(118, size=9)])
def test_different_calls_on_two_hosts(odd: dict[str, Any]) -> None:
    ranks, all_ranks = AllHosts(), (0, 1, 2, 3)
    a, b = Launcher("a", ranks, clock=7.0), Launcher("b", ranks, clock=0.0)
    a.wait(2.6, {0: beat(118, 117, ranks=all_ranks, tickets=[odd]), 1: beat(118, 117, ranks=all_ranks)})
    b.wait(2.6, {rank: beat(118, 117, ranks=all_ranks) for rank in (2, 3)})
    found = ranks.verdict(["a", "b"], LIMITS)
    assert found is not None
    assert (found.kind, found.rank, found.is_final) == ("mismatch", 0, True)


@pytest.mark.parametrize("ahead", [118, 119])
def test_a_call_over_a_slow_link_is_named_and_not_ended(ahead: int) -> None:
    """It may be much data. Rank 0 may be in the next call: what it has sent is still on its way to rank 1."""
    ranks = AllHosts()
    a, b = Launcher("a", ranks, clock=7.0), Launcher("b", ranks, clock=0.0)
    for seconds, is_final in ((25.0, None), (10.0, False), (480.0, False), (90.0, True)):
        a.wait(seconds, {0: beat(ahead, ahead - 1)})
        b.wait(seconds, {1: beat(118, 117)})
        found = ranks.verdict(["a", "b"], LIMITS)
        assert (None if found is None else found.is_final) == is_final
        if found is not None:
            assert (found.kind, found.waiting, str(found.call)) == (
                "network",
                (0, 1),
                "all_reduce #118 of dp (float32[8])",
            )


def test_nothing_is_sent_while_ranks_move_and_beats_are_sent_once() -> None:
    ranks = AllHosts()
    a, b = Launcher("a", ranks, clock=7.0), Launcher("b", ranks, clock=0.0)
    for step in range(20):
        a.since = a.clock
        a.wait(0.8, {0: beat(step, step)})
    assert a.sent == []
    a.wait(60.0, {0: beat(118, 117)})
    assert ["beats" in report for report in a.sent] == [True] + [False] * (len(a.sent) - 1)
    assert 30 < len(a.sent) < 60
    ((rank, _, still, _),) = a.sent[-1]["now"]
    assert rank == 0
    assert still > 60.0 - MOST - 0.3
    b.wait(60.0, {1: beat(117, 117)})
    a.since = a.clock  # it has ended while b looked
    a.look({0: beat(119, 118)})
    assert a.sent[-1] == {"say": "stall", "now": []}
    assert ranks.verdict(["a", "b"], LIMITS) is None
    a.wait(4.0, {0: beat(119, 118)})
    found = ranks.verdict(["a", "b"], LIMITS)
    assert found is not None
    assert found.call is not None
    assert found.call.number == 119


def test_a_host_that_is_done_is_not_waited_for() -> None:
    ranks = AllHosts()
    b = Launcher("b", ranks, clock=0.0)
    pair = {2: beat(118, 117, ranks=(2, 3)), 3: beat(117, 117, ranks=(2, 3))}
    b.wait(4.0, pair)
    assert ranks.verdict(["a", "b"], LIMITS) is None
    found = ranks.verdict(["b"], LIMITS)
    assert found is not None
    assert found.rank == 3


def test_beats_of_a_large_host_fit_into_a_message() -> None:
    channels = {f"gloo/{name}": (7, 7 - (name < 2)) for name in range(1000)}
    groups = {str(name): ("dp", tuple(range(8))) for name in range(1000)}
    beats = {rank: beat(1, 1, counters=channels, groups=groups) for rank in range(8)}
    plain = plain_beats(beats)
    assert len(json.dumps(plain)) <= MOST_BEATS
    assert [(each["is_partial"], len(each["counters"])) for _, each in plain["ranks"]] == [(True, 2)] * 8
    assert not plain_beats({0: beat(118, 117)})["ranks"][0][1].get("is_partial")


def left(beats: dict[int, dict[str, Any]]) -> dict[str, Any]:
    stacks = [[rank, f"  stack of rank {rank}: here"] for rank in beats]
    return json.loads(json.dumps({"say": "failed", "left": {"beats": plain_beats(beats), "stacks": stacks}}))  # type: ignore[no-any-return]


def test_another_shape_on_another_host_explains_an_abort() -> None:
    """gloo ends a process by abort(), here that of rank 0, which has made no mistake."""
    ranks = AllHosts()
    aborted = Failure(code="N024", rank=0, at=3.0, what="was killed by signal 6 (SIGABRT)", is_sudden=True)
    ranks.note("a", left({0: beat(118, 118, tickets=[ticket(118, size=8, done=True)])}))
    assert ranks.explained(aborted, num_ranks=2, timeout=60.0) == aborted
    ranks.note("b", left({1: beat(118, 118, tickets=[ticket(118, size=9, done=True)])}))
    found = ranks.explained(aborted, num_ranks=2, timeout=60.0)
    assert (found.code, found.rank, found.may_pass) == ("N033", 1, False)
    assert found.what == "called all_reduce of float32[9] as #118 of dp; rank 0 called all_reduce of float32[8]"
    assert found.details == "  stack of rank 1: here"
    for other in (replace(aborted, code="N057"), replace(aborted, is_sudden=False)):
        assert ranks.explained(other, num_ranks=2, timeout=60.0) == other


def test_a_killed_rank_is_reported_with_the_call_of_the_other_host() -> None:
    ranks = AllHosts()
    killed = Failure(code="N024", rank=1, at=3.0, what="was killed by signal 9 (SIGKILL)", is_sudden=True)
    ranks.note("a", left({0: beat(118, 118, tickets=[ticket(118, done=True)])}))
    ranks.note("b", left({1: beat(117, 117, tickets=[ticket(117, done=True)])}))
    found = ranks.explained(killed, num_ranks=2, timeout=60.0)
    assert found.what == "was killed by signal 9 (SIGKILL), while others were in all_reduce #118 of dp (float32[8])"


def test_a_verdict_of_each_kind_arrives_as_it_was_sent() -> None:
    versions = (((0, 2), "all_reduce of float32[8]"), ((1,), "broadcast"))
    sent = Verdict(kind="mismatch", rank=1, waited=2.5, waiting=(0, 2), versions=versions, phase="save", wchan="x")
    assert verdict_from(json.loads(json.dumps(asdict(sent)))) == sent
