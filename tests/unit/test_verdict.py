"""The verdict over hung ranks, from made-up heartbeats and process states: each row of the table, no false alarm."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.heartbeat import recorder
from shoal.comm.heartbeat.arrivals import Arrivals
from shoal.comm.heartbeat.board import HeartbeatBoard
from shoal.comm.heartbeat.heart import Heart
from shoal.comm.heartbeat.ticket import Ticket
from shoal.launch import cgroup
from shoal.launch.failure import Failure, write_failure
from shoal.launch.host_memory import Memory
from shoal.launch.watch.hang_thresholds import Thresholds
from shoal.launch.watch.host_report import StallReporter
from shoal.launch.watch.reading import ProcessState, Reading, cpu_of_descendants
from shoal.launch.watch.report import problem_of
from shoal.launch.watch.stacks import excerpt, is_debugged, main_frames, outliers
from shoal.launch.watch.verdict import Call, Verdict, call_of_waiting, find_mismatch, verdict
from shoal.launch.watch.watcher import Watcher

LIMITS = Thresholds(600.0)
GROUPS = {"0": ("world", (0, 1, 2, 3)), "1": ("dp", (0, 1, 2, 3)), "2": ("tp", (0, 1)), "3": ("tp", (2, 3))}
HOST = {"1": ("dp", (0, 1)), "4": ("pp", (1, 3))}
"""Groups of two ranks, one of which talks to rank 3 of another host."""
RUNS = ProcessState()


def ticket(
    number: int, operation: str = "all_reduce", size: int = 8, dtype: str = "Float", done: bool = False
) -> Ticket:
    return Ticket("1", number, operation, (dtype,), ((size,),), number, done)


def waits(number: int = 118, still: float = 4.0, **others: object) -> Reading:
    """A rank in `all_reduce #number` of dp."""
    fields = {
        "counters": {"gloo/1": (number, number - 1)},
        "tickets": (ticket(number),),
        "still": still,
        "median_step": 0.03,
    }
    return Reading(**{"groups": GROUPS, **fields, **others})  # type: ignore[arg-type]


def behind(still: float = 4.0, **others: object) -> Reading:
    """A rank that has completed #117 and is somewhere else."""
    return waits(**{"counters": {"gloo/1": (117, 117)}, "tickets": (), "still": still, **others})  # type: ignore[arg-type]


WAITING = {0: waits(), 1: waits(), 2: behind(), 3: waits()}
LONG = {rank: replace(each, still=5.2) for rank, each in WAITING.items()}
IN_TP = {"gloo/1": (118, 118), "gloo/3": (43, 42)}
"""Counters of a rank that has completed dp #118 and waits in tp #43."""


@pytest.mark.parametrize(
    ("name", "readings", "state", "found"),
    [
        ("sleeps", WAITING, RUNS, ("never_entered", 2, 118, False)),
        ("sleeps for long", LONG, RUNS, ("never_entered", 2, 118, True)),
        ("sleeps for long, and has a GPU", {**LONG, 2: replace(LONG[2], uses_gpu=True)}, RUNS,
         ("never_entered", 2, 118, False)),
        ("its channels did not fit on the board", {**LONG, 2: replace(LONG[2], counters={}, is_partial=True)}, RUNS,
         None),
        ("computes", WAITING, ProcessState(busy=0.9), ("never_entered", 2, 118, False)),
        ("computes for long", {rank: replace(each, still=31) for rank, each in WAITING.items()},
         ProcessState(busy=0.9), ("never_entered", 2, 118, True)),
        ("has no core", WAITING, ProcessState(letter="R"), ("never_entered", 2, 118, False)),
        ("in the kernel", WAITING, ProcessState(letter="D", wchan="nfs_wait"), ("kernel", 2, 118, False)),
        ("no heartbeat", {**LONG, 2: behind(age=3.0, still=5.2)}, RUNS, ("gil", 2, 118, True)),
        ("no heartbeat, old counters", {**LONG, 2: behind(age=3.0, still=5.2, counters={"gloo/1": (115, 114)})}, RUNS,
         ("gil", 2, 118, True)),
        ("stopped", {0: waits(still=1.5), 1: waits(still=1.5), 2: behind(still=2.2), 3: waits(still=1.5)},
         ProcessState(letter="T", stopped=2.1), ("stopped", 2, 118, True)),
        ("stopped for a moment", WAITING, ProcessState(letter="T", stopped=0.4), ("never_entered", 2, 118, False)),
        ("debugged", WAITING, ProcessState(letter="t", is_traced=True), None),
        ("too early", {**WAITING, 0: waits(still=2.8)}, RUNS, None),
        ("long steps", {rank: replace(each, median_step=2.0) for rank, each in WAITING.items()}, RUNS, None),
        ("fetches data", {**WAITING, 2: behind(phase="data")}, RUNS, ("never_entered", 2, 118, False)),
        ("first step", {**WAITING, 2: behind(phase="first steps")}, RUNS, None),
        ("saves", {rank: replace(each, still=40.0, phase="save") for rank, each in WAITING.items()}, RUNS,
         ("never_entered", 2, 118, False)),
        ("saves for ever", {rank: replace(each, still=541.0, phase="save") for rank, each in WAITING.items()}, RUNS,
         ("never_entered", 2, 118, True)),
        ("all compute", dict.fromkeys(range(4), behind(still=100.0)), RUNS, None),
        ("a chain", {**LONG, 3: waits(still=5.2, counters=IN_TP)}, RUNS,
         ("never_entered", 2, None, True)),
        ("all have entered", dict.fromkeys(range(4), waits(still=31.0)), RUNS, ("network", 0, 118, True)),
        ("waits for another host", {2: waits(counters={"gloo/1": (118, 117), "gloo/3": (42, 42)}),
                                    3: waits(counters={"gloo/1": (118, 118), "gloo/3": (43, 42)})}, RUNS, None),
        ("all have entered, one may wait for another host", {
            0: waits(still=31.0, groups=HOST),
            1: waits(still=31.0, counters={"gloo/1": (118, 117), "gloo/4": (3, 2)}, groups=HOST)
        }, RUNS, None),
        ("behind, and may wait for any rank",
         {**WAITING, 2: behind(counters={"gloo/1": (117, 117), "1:-1>2": (3, 2)})}, RUNS, None),
        ("unknown", {**WAITING, 2: behind(still=99.0, phase="unknown", counters={})}, RUNS, None),
        ("on another host", {0: waits(still=99.0), 1: waits(still=99.0)}, RUNS, None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_rank_that_holds_up_the_others_is_named(
    name: str, readings: dict[int, Reading], state: ProcessState, found: tuple[str, int, int | None, bool] | None
) -> None:
    said = verdict(readings, {rank: state if rank == 2 else RUNS for rank in readings}, LIMITS)
    if found is None:
        assert said is None
        return
    assert said is not None
    kind, rank, number, is_final = found
    assert (said.kind, said.rank, said.is_final) == (kind, rank, is_final)
    if number is not None:
        assert said.call is not None
        assert (said.call.number, said.call.axis, said.call.operation) == (number, "dp", "all_reduce")


def test_a_paused_run_is_left_alone() -> None:
    states = dict.fromkeys(range(4), ProcessState(letter="T", stopped=100.0))
    assert verdict(dict.fromkeys(range(4), behind(still=100.0)), states, LIMITS) is None


def test_all_ranks_of_a_host_are_stopped_while_those_of_another_one_wait() -> None:
    readings = {0: behind(still=3.0), 1: behind(still=3.0), 2: waits(still=1.5), 3: waits(still=1.5)}
    stopped = ProcessState(letter="T", stopped=2.0)
    found = verdict(readings, {0: stopped, 1: stopped, 2: RUNS, 3: RUNS}, LIMITS)
    assert found is not None
    assert (found.kind, found.rank, found.is_final) == ("stopped", 0, True)
    assert "while ranks 2, 3 waited in all_reduce #118" in problem_of(found, num_ranks=4, timeout=60.0).what


@pytest.mark.parametrize(
    ("odd", "call"),
    [
        (ticket(118, "broadcast"), "broadcast of float32[8]"),
        (ticket(118, size=9), "all_reduce of float32[9]"),
        (ticket(118, dtype="Double"), "all_reduce of float64[8]"),
    ],
)
def test_different_calls_name_the_minority_even_if_one_of_them_has_completed(odd: Ticket, call: str) -> None:
    ahead = waits(counters={"gloo/1": (119, 118)}, tickets=(replace(odd, is_done=True), ticket(119)))
    found = verdict({0: waits(), 1: ahead, 2: waits()}, dict.fromkeys(range(3), RUNS), LIMITS)
    assert found is not None
    assert (found.kind, found.rank, found.is_final) == ("mismatch", 1, True)
    assert found.versions == (((0, 2), "all_reduce of float32[8]"), ((1,), call))
    text = problem_of(found, num_ranks=3, timeout=600.0).what
    assert text == f"rank 1 of 3 called {call} as #118 of dp; ranks 0, 2 called all_reduce of float32[8]"


@pytest.mark.parametrize(("phase", "still", "is_final"), [
    ("first steps", 29.0, None), ("save", 31.0, False), ("compiled step", 31.0, False), ("data", 4.0, False),
    ("save", 541.0, True),
])  # fmt: skip
def test_different_calls_outside_of_a_step_have_the_limits_of_their_phase(
    phase: str, still: float, is_final: bool | None
) -> None:
    odd = waits(tickets=(ticket(118, "broadcast"),), still=still, phase=phase)
    found = verdict({0: waits(still=still), 1: odd, 2: waits(still=still)}, dict.fromkeys(range(3), RUNS), LIMITS)
    if is_final is None:
        assert found is None
        return
    assert found is not None
    assert (found.kind, found.rank, found.is_final) == ("mismatch", 1, is_final)


def test_calls_of_two_backends_under_one_number_are_no_mismatch() -> None:
    """A group of gloo and NCCL: rank 0 has entered NCCL's first call, and rank 1 gloo's first one before it."""
    gloo, nccl = ticket(1, "broadcast"), replace(ticket(1), backend="nccl")
    readings = {
        0: waits(counters={"gloo/1": (1, 1), "nccl/1": (1, 0)}, tickets=(replace(gloo, is_done=True), nccl)),
        1: waits(counters={"gloo/1": (1, 1)}, tickets=(replace(gloo, is_done=True),)),
        2: waits(counters={"gloo/1": (0, 0), "nccl/1": (1, 0)}, tickets=(nccl,)),
    }
    assert find_mismatch(readings) is None
    readings[2] = waits(counters={"gloo/1": (1, 1), "nccl/1": (1, 0)}, tickets=(nccl,))
    found = verdict(readings, dict.fromkeys(range(3), RUNS), LIMITS)
    assert found is not None
    assert (found.kind, found.rank, str(found.call)) == ("never_entered", 1, "all_reduce #1 of dp (float32[8])")


def test_messages_of_nccl_have_no_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {
        "process_group": ["0", ""],
        "collective_seq_id": 3,
        "input_dtypes": [],
        "input_sizes": [],
        "retired": False,
    }
    entry |= {"time_created_ns": 1, "is_p2p": False, "p2p_seq_id": 0, "pg_id": 0}
    entries = [
        {**entry, "profiling_name": "nccl:all_reduce"},
        {**entry, "profiling_name": "nccl:send 0->1", "is_p2p": True, "p2p_seq_id": 1},
        {**entry, "profiling_name": "nccl:coalesced", "p2p_seq_id": 2},
        {**entry, "profiling_name": "nccl:coalesced"},
    ]
    monkeypatch.setattr(recorder, "_dumps", lambda *, with_entries: [("nccl", {"entries": entries})])
    monkeypatch.setattr(recorder, "_names", {})
    assert [(each.channel, each.operation) for each in recorder.tickets()] == [
        ("nccl/0", "all_reduce"),
        ("nccl/0", "coalesced"),
    ]


def test_the_minority_is_not_known_where_ranks_of_a_group_are_not_seen() -> None:
    """Ranks 0 and 1 of a group of four make different calls. Which of them is wrong, the other host shows."""
    here = {0: waits(), 1: waits(tickets=(ticket(118, size=9),))}
    states = dict.fromkeys(range(4), RUNS)
    assert verdict(here, {0: RUNS, 1: RUNS}, LIMITS, has_other_hosts=True) is None
    assert find_mismatch(here, has_other_hosts=True) is None
    for odd, size in ((0, 9), (1, 8)):
        found = verdict({**here, **{rank: waits(tickets=(ticket(118, size=size),)) for rank in (2, 3)}}, states, LIMITS)
        assert found is not None
        assert (found.kind, found.rank) == ("mismatch", odd)


def test_inputs_that_may_differ_are_no_mismatch() -> None:
    readings = {rank: waits(tickets=(ticket(118, "all_to_all", size=rank),)) for rank in range(3)}
    assert find_mismatch(readings) is None


def test_ranks_that_wait_for_each_other() -> None:
    """Rank 0 has entered tp and not dp, rank 1 dp and not tp."""
    groups = {"1": ("dp", (0, 1)), "2": ("tp", (0, 1))}
    readings = {
        0: waits(counters={"gloo/1": (117, 117), "gloo/2": (5, 4)}, tickets=(), groups=groups),
        1: waits(counters={"gloo/1": (118, 117), "gloo/2": (4, 4)}, groups=groups),
    }
    found = verdict(readings, dict.fromkeys(range(2), RUNS), LIMITS)
    assert found is not None
    assert found.kind == "order"
    text = problem_of(found, num_ranks=2, timeout=600.0).what
    assert "rank 0 in collective #5 of tp" in text
    assert "rank 1 in all_reduce #118 of dp (float32[8])" in text
    assert "find_unused_parameters" not in problem_of(found, num_ranks=2, timeout=600.0).fix
    averaging = replace(found, versions=(((0,), "collective #5 of world"), ((1,), "all_reduce #118 of dp_replicate")))
    fix = problem_of(averaging, num_ranks=2, timeout=600.0).fix
    assert fix.endswith("if the loss of a rank leaves parameters out, --run.find_unused_parameters true")
    states = {0: ProcessState(wchan="futex_wait_queue"), 1: ProcessState(wchan="hrtimer_nanosleep")}
    found = verdict(readings, states, LIMITS)  # rank 1 has started its collective, and does not wait for it
    assert found is not None
    assert (found.kind, found.rank, str(found.call)) == ("never_entered", 1, "collective #5 of tp")


@pytest.mark.parametrize(
    ("inside", "before", "text"),
    [
        (
            (0,),
            "all_reduce",
            "rank 0 of 3 entered barrier #5 of world, which ranks 1, 2 never entered; for 4.0 s, ranks",
        ),
        ((0, 1), "all_reduce", "rank 0 of 3 entered barrier #5 of world (as did rank 1), which rank 2 never entered"),
        ((0,), "barrier", "rank 0 of 3 entered barrier #5 of world, which ranks 1, 2 never entered"),
        ((0, 1), "barrier", "rank 2 of 3 entered all_reduce #118 of dp (float32[8]), which ranks 0, 1 never entered"),
    ],
)
def test_a_call_that_some_ranks_make_alone(inside: tuple[int, ...], before: str, text: str) -> None:
    """The unusual call is named, whoever is in it. If both are usual, the one with fewer ranks."""
    groups = {"0": ("world", (0, 1, 2)), "1": ("dp", (0, 1, 2))}
    usual = (replace(ticket(4), group="0", operation=before), ticket(117, done=True))
    barrier = replace(ticket(5, "barrier"), group="0", dtypes=(), sizes=())
    usual = (replace(usual[0], dtypes=(), sizes=()), usual[1])
    readings = {}
    for rank in range(3):
        counters = {"gloo/0": (4, 4), "gloo/1": (118, 117)}
        tickets: tuple[Ticket, ...] = (*usual, ticket(118))
        if rank in inside:
            counters, tickets = {"gloo/0": (5, 4), "gloo/1": (117, 117)}, (*usual, barrier)
        readings[rank] = waits(counters=counters, tickets=tickets, groups=groups)
    found = verdict(readings, dict.fromkeys(range(3), RUNS), LIMITS)
    assert found is not None
    assert found.kind == "alone"
    assert problem_of(found, num_ranks=3, timeout=600.0).what.startswith(text)


def test_messages_between_two_ranks_are_channels() -> None:
    """Stage 1 waits for a message of stage 0, which has sent one less."""
    readings = {
        0: waits(counters={"2:0>1": (6, 6)}, tickets=()),
        1: waits(counters={"2:0>1": (7, 6)}, tickets=()),
    }
    found = verdict(readings, dict.fromkeys(range(2), RUNS), LIMITS)
    assert found is not None
    assert (found.kind, found.rank, str(found.call)) == ("never_entered", 0, "message 0 to 1 #7 of tp")


def test_the_exchange_of_numbers_is_a_channel() -> None:
    readings = {0: waits(counters={"board": (9, 8)}, tickets=()), 1: behind(counters={"board": (8, 8)})}
    found = verdict(readings, dict.fromkeys(range(2), RUNS), LIMITS)
    assert found is not None
    assert (found.rank, str(found.call)) == (1, "exchange #9 of the step's numbers")


def test_survivors_know_where_they_lost_a_rank() -> None:
    done = waits(counters={"gloo/1": (118, 118)}, tickets=(ticket(117, done=True), ticket(118, done=True)))
    assert str(call_of_waiting({0: done, 1: behind()}, 1)) == "all_reduce #118 of dp (float32[8])"
    assert call_of_waiting({1: behind()}, 1) is None


def test_a_call_of_training_explains_more_than_one_of_a_thread_that_saves() -> None:
    groups = {**GROUPS, "9": ("background", (0, 1))}
    saves = replace(ticket(7, "all_gather"), group="9", nanoseconds=1000)
    counters = {"gloo/9": (7, 6), "gloo/1": (118, 117)}
    waiting = waits(counters=counters, tickets=(saves, ticket(118)), groups=groups)
    late = behind(counters={"gloo/1": (117, 117), "gloo/9": (6, 6)}, groups=groups)
    found = verdict({0: waiting, 1: late}, {0: RUNS, 1: RUNS}, LIMITS)
    assert found is not None
    assert str(found.call) == "all_reduce #118 of dp (float32[8])"
    assert call_of_waiting({0: waiting, 1: late}, 1) == found.call


def test_all_limits_follow_from_the_timeout() -> None:
    for seconds in (1.0, 10.0, 600.0, 86400.0):
        limits = Thresholds(seconds)
        for phase in ("start", "first steps", "data", "step", "save"):
            for median in (0.0, 0.01, 1.0, 1e4):
                for may_pass, holds_gil in ((False, False), (False, True), (True, False)):
                    named = limits.named(phase, median, holds_gil=holds_gil)
                    ended = limits.ended(phase, median, may_pass=may_pass, holds_gil=holds_gil)
                    assert 0 < named <= ended <= limits.last < seconds, (phase, median, may_pass)
        assert limits.stopped < seconds
    assert LIMITS.ended("first steps", 0.0, may_pass=False) == 60.0  # a hang right after a restart
    assert LIMITS.ended("first steps", 0.0, may_pass=False, holds_gil=True) == 10.0
    assert LIMITS.ended("first steps", 0.0, may_pass=True) == 540.0


def test_a_rank_that_sleeps_with_the_gil_in_a_first_step_has_a_quarter_of_the_time() -> None:
    """One that computes or waits for a disk there may load a library."""
    readings = {rank: waits(still=16.0) for rank in (0, 1, 3)}
    readings[2] = behind(still=16.0, age=16.0, phase="first steps")
    found = verdict(readings, dict.fromkeys(range(4), RUNS), LIMITS)
    assert found is not None
    assert (found.kind, found.rank, found.is_final) == ("gil", 2, True)
    for state in (replace(RUNS, letter="D"), replace(RUNS, busy=0.9)):
        assert verdict(readings, {**dict.fromkeys(range(4), RUNS), 2: state}, LIMITS) is None


# ---- stacks ---------------------------------------------------------------------------------------------------------

FAULTHANDLER = """Thread 0x00007f (most recent call first):
  File "/x/comm/heartbeat/heart.py", line 9 in _run

Current thread 0x00007e (most recent call first):
  File "/x/model.py", line 3 in read
  File "/x/launch/worker.py", line 7 in work
  File "/x/process.py", line 7 in run
"""
PY_SPY = """Process 5: python
Python v3.11.7 (/usr/bin/python3.11)

Thread 5 (idle): "MainThread"
    read (model.py:3)
    work (launch/worker.py:7)
Thread 6 (idle): "other"
    wait (threading.py:3)
"""


@pytest.mark.parametrize("stack", [FAULTHANDLER, PY_SPY])
def test_frames_of_the_main_thread(stack: str) -> None:
    assert main_frames(stack)[0].startswith("read (")
    assert excerpt(stack).strip().splitlines() == [main_frames(stack)[0]]
    assert not is_debugged(stack)
    for path in ("pdb.py", "/usr/lib/python3.11/bdb.py", "/x/site-packages/_pydevd_bundle/pydevd_frame.py"):
        assert is_debugged(stack.replace("/x/model.py", path).replace("model.py", path))
    for path in ("/data/pdb/model.py", "/x/my_pdb.py", "/pdb.py/model.py", "/home/pudb/src/model.py"):
        assert not is_debugged(stack.replace("/x/model.py", path).replace("model.py", path))


def test_the_stack_that_differs_from_most() -> None:
    other = FAULTHANDLER.replace("line 3 in read", "line 8 in reduce")
    assert outliers({0: other, 1: other, 2: FAULTHANDLER}) == [2]
    assert outliers({0: other, 1: FAULTHANDLER}) == []


# ---- the watcher ----------------------------------------------------------------------------------------------------


def watcher_of(tmp_path: Path, beats: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, **place: int) -> Watcher:
    """A watcher whose ranks have written these beats, and nothing since; their stacks cannot be read."""
    found = Watcher.start(tmp_path, len(beats), timeout=600.0, turn=100.0, **place)
    assert found is not None
    monkeypatch.setattr("shoal.launch.watch.watcher.stack_of", lambda *args, **options: "")
    for index, beat in enumerate(beats):
        found.board.write(index, beat)
    return found


def beat_of(entered: int, completed: int, **others: Any) -> dict[str, Any]:
    """A beat of a rank in group 1, which ranks 2 and 3 are in."""
    state = {"counters": {"gloo/1": (entered, completed)}, "phase": "step", "step": 9, "tickets": [], "beat": 1.0}
    return {**state, "median": 0.01, "groups": {"1": ("dp", (2, 3))}, **others}


def look_later(watcher: Watcher, seconds: float) -> Failure | None:
    """Look twice, some seconds apart on the watcher's clock. All hearts beat, and nothing else moves."""
    pids = dict.fromkeys(range(watcher.board.size), os.getpid())
    watcher.look(pids)
    for index in pids:
        beat = watcher.board.read(index)
        assert beat is not None
        watcher.board.write(index, {**beat, "beat": beat["beat"] + 1})
    watcher._last_look -= seconds
    return watcher.look(pids)


def test_a_rank_that_sent_more_than_the_others_shows_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that got too much abort. The rank that sent it loses its peers, and its exception has the place."""
    beats = [beat_of(7, 6, tickets=[asdict(ticket(7, size=size))]) for size in (8, 9)]
    watcher = watcher_of(tmp_path, beats, monkeypatch, first_rank=2, num_ranks=4)
    trace = 'Traceback (most recent call last):\n  File "/me/model.py", line 12, in forward\n    dist.all_reduce(x)\n'
    error = RuntimeError("Connection closed by peer")
    write_failure(tmp_path, Failure(code="N022", rank=1, at=0.0, what="", details=trace, is_echo=True), error)
    found = watcher.explain(Failure(code="N024", rank=0, at=1.0, what="aborted", is_sudden=True))
    assert (found.code, found.rank) == ("N033", 1)
    assert found.details == "  stack of rank 3:\n    forward (/me/model.py:12)"


def test_ranks_of_a_second_host_are_named_among_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    watcher = watcher_of(tmp_path, [beat_of(7, 6), beat_of(6, 6)], monkeypatch, first_rank=2, num_ranks=4)
    assert look_later(watcher, 4.0) is None
    assert capfd.readouterr().err == ""  # the coordinator may know more
    assert look_later(watcher, 1.0) is None
    assert "rank 3 of 4 never entered collective #7 of dp; rank 2 has waited" in capfd.readouterr().err
    assert look_later(watcher, 30.0) is None
    failure = look_later(watcher, 1.0)
    assert failure is not None
    assert failure.rank == 1  # on this host
    assert failure.what.startswith("never entered")


def test_a_verdict_over_all_hosts_is_acted_on_unless_the_rank_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 2 is alone on this host, and rank 0 of another one waits for it."""
    beat = {**beat_of(6, 6), "groups": {"1": ("dp", (0, 2))}}
    watcher = watcher_of(tmp_path, [beat], monkeypatch, first_rank=2, num_ranks=3)
    sent: list[dict[str, Any]] = []
    watcher.reporter = StallReporter(sent.append)
    call = Call(channel="gloo/1", number=7, axis="dp", operation="all_reduce")
    named = Verdict(kind="never_entered", rank=2, call=call, waited=3.2, waiting=(0,), is_final=False)
    pids = {0: os.getpid()}
    watcher.look(pids)
    assert sent == []
    for final in (named, replace(named, is_final=True)):
        watcher.accused = final
        watcher.look(pids)  # it has not been still for so long
    assert look_later(watcher, 3.4) is None
    assert (sent[0]["say"], sent[0]["now"][0][0]) == ("stall", 2)
    watcher.accused = named
    assert watcher.look(pids) is None
    assert "rank 2 of 3 never entered all_reduce #7 of dp; rank 0 has waited 3.2 s" in capfd.readouterr().err
    watcher.accused = replace(named, is_final=True)
    failure = watcher.look(pids)
    assert failure is not None
    assert (failure.code, failure.rank, failure.is_lost) == ("N030", 0, True)
    assert watcher.look(pids) is None  # one verdict, one act
    watcher.board.write(0, {**beat, "counters": {"gloo/1": (7, 7)}})
    watcher.accused = replace(named, is_final=True)
    assert watcher.look(pids) is None
    assert sent[-1]["now"] == []


def test_a_slow_link_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    watcher = watcher_of(tmp_path, [beat_of(7, 6)], monkeypatch, first_rank=2, num_ranks=4)
    look_later(watcher, 40.0)
    for number in (7, 8, 8):
        call = Call(channel="gloo/1", number=number, axis="dp", operation="all_reduce")
        watcher.accused = Verdict(kind="network", rank=2, call=call, waited=31.0, waiting=(2, 3), is_final=False)
        assert watcher.look({0: os.getpid()}) is None
    assert capfd.readouterr().err.count("has not ended for 31.0 s") == 1


def test_progress_while_a_stack_is_read_saves_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = watcher_of(tmp_path, [beat_of(7, 6), beat_of(6, 6)], monkeypatch, first_rank=2)

    def read_slowly(*args: Any, **options: Any) -> str:
        watcher.board.write(1, beat_of(7, 6))
        return ""

    monkeypatch.setattr("shoal.launch.watch.watcher.stack_of", read_slowly)
    assert look_later(watcher, 40.0) is None
    monkeypatch.setattr("shoal.launch.watch.watcher.stack_of", lambda *args, **options: "")
    watcher.board.write(1, beat_of(6, 6))
    assert look_later(watcher, 40.0) is not None


def test_a_stopped_rank_that_was_continued_for_its_stack_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = watcher_of(tmp_path, [beat_of(7, 6), beat_of(6, 6)], monkeypatch, first_rank=2)
    letters: list[str] = []

    def read_stack(*args: Any, **options: Any) -> str:
        watcher.board.write(1, beat_of(7, 6))
        letters.extend("SS")
        return ""

    def state(pid: int) -> ProcessState:
        return ProcessState(letter=letters.pop() if letters else "T" if pid == 1 else "S")

    monkeypatch.setattr("shoal.launch.watch.watcher.stack_of", read_stack)
    monkeypatch.setattr("shoal.launch.watch.watcher.read_state", state)
    watcher.look({0: 0, 1: 1})
    watcher._last_look -= 2.5
    failure = watcher.look({0: 0, 1: 1})
    assert failure is not None
    assert (failure.code, failure.rank) == ("N025", 1)


def test_a_rank_in_a_debugger_is_left_alone_until_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = watcher_of(tmp_path, [beat_of(7, 6), beat_of(6, 6)], monkeypatch, first_rank=2)
    watcher.turn = 1000.0
    reads: list[int] = []

    def read_stack(pid: int, *args: Any, **options: Any) -> str:
        reads.append(pid)
        return FAULTHANDLER.replace("/x/model.py", "/usr/lib/python3.11/pdb.py")

    monkeypatch.setattr("shoal.launch.watch.watcher.stack_of", read_stack)
    assert look_later(watcher, 40.0) is None
    assert look_later(watcher, 1.0) is None
    assert len(reads) == 1
    assert look_later(watcher, 570.0) is not None


def test_the_cpu_time_of_children_is_read() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    try:
        least = cpu_of_descendants(os.getpid()) + 0.1 - 1e-9  # sums of hundredths are rounded
        deadline = time.monotonic() + 10
        while cpu_of_descendants(os.getpid()) < least and time.monotonic() < deadline:
            time.sleep(0.01)
        assert cpu_of_descendants(os.getpid()) >= least
    finally:
        child.kill()
        child.wait()
    assert cpu_of_descendants(os.getpid()) >= least  # it has ended


@pytest.mark.parametrize("computes", [True, False])
def test_a_rank_whose_child_computes_is_not_ended(
    computes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler in a child process, for which a rank waits."""
    watcher = watcher_of(tmp_path, [beat_of(7, 6), beat_of(6, 6)], monkeypatch, first_rank=2)
    monkeypatch.setattr("shoal.launch.watch.watcher.cpu_of_descendants", lambda pid: computes * watcher.clock)
    monkeypatch.setattr("shoal.launch.watch.watcher.read_state", lambda pid: ProcessState())
    assert look_later(watcher, 2.0) is None
    assert (look_later(watcher, 7.0) is None) == computes


# ---- shared memory and control groups -------------------------------------------------------------------------------


def test_a_phase_that_has_just_begun_is_seen_before_the_next_beat(tmp_path: Path) -> None:
    """A rank that held the GIL from the start of a step seemed to fetch data, and was ended after nine minutes."""
    board = HeartbeatBoard.create(tmp_path / "board", 2)
    assert board is not None
    heart = Heart(HeartbeatBoard(tmp_path / "board", 2), board, index=1, stack_file=tmp_path / "stacks")
    heart.phase, heart.steps_here = "data", 9
    heart.beat()
    assert heart.begin("step") == "data"
    seen = board.read(1)
    assert seen is not None
    assert (seen["phase"], board.read(0)) == ("step", None)
    assert heart.begin("a phase with a name that is far too long") == "step"
    seen = board.read(1)
    assert seen is not None
    assert seen["phase"] == "a phase with a name that"
    heart._beat_without_counters()
    unknown = board.read(1)
    assert unknown is not None
    assert unknown["phase"] == "unknown"


def test_a_torn_write_leaves_the_state_before(tmp_path: Path) -> None:
    board = HeartbeatBoard.create(tmp_path / "board", 2)
    assert board is not None
    assert board.read(1) is None
    for step in range(4):
        assert board.write(1, {"step": step})
    assert HeartbeatBoard(tmp_path / "board", 2).read(1) == {"step": 3}
    data = bytearray((tmp_path / "board").read_bytes())
    at = data.index(b'"step":3')
    data[at + 7 : at + 8] = b"9"
    (tmp_path / "board").write_bytes(data)
    assert HeartbeatBoard(tmp_path / "board", 2).read(1) == {"step": 2}
    assert board.read(0) is None
    assert not board.write(0, {"text": "x" * 2**16})


def test_the_recorder_is_read_only_while_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read beside the first collective of a group crashes the process."""
    board = HeartbeatBoard.create(tmp_path / "board", 1)
    assert board is not None
    heart = Heart(board, board, index=0, stack_file=tmp_path / "stacks")
    reads: list[int] = []
    monkeypatch.setattr(recorder, "counters", lambda messages: reads.append(len(pending)) or {"gloo/0": (7, 6)})
    monkeypatch.setattr(recorder, "tickets", list)
    numbers = [1, 2, 3, 4, 5, 6, *[7] * 15, 8, 9]
    pending: list[int] = []
    for number in numbers:
        heart._entered = lambda number=number: {"gloo/0": number}  # type: ignore[method-assign]
        heart.beat()
        entered, completed = board.read(0)["counters"]["gloo/0"]  # type: ignore[index]
        pending.append(entered - completed)
    assert reads == [8, 13, 18]
    assert pending == [0] * 8 + [1] * 13 + [0] * 2


@pytest.mark.parametrize(("num_pending", "left"), [(0, 0), (2, 2), (3000, 0)])
def test_a_beat_of_a_large_world_fits_on_the_board(tmp_path: Path, num_pending: int, left: int) -> None:
    board = HeartbeatBoard.create(tmp_path / "board", 1)
    assert board is not None
    heart = Heart(board, board, index=0, stack_file=tmp_path / "stacks")
    channels = {f"gloo/{name}": (7, 7 - (name < num_pending)) for name in range(3000)}
    heart._known = {str(name): ("dp", tuple(range(8))) for name in range(3000)}
    heart._own_counters = lambda: channels  # type: ignore[method-assign]
    heart.step = 5
    heart.beat()
    beat = board.read(0)
    assert beat is not None
    assert (beat["step"], beat["is_partial"], len(beat["counters"])) == (5, True, left)
    assert len(Reading.parse(beat, age=0.0, still=0.0).groups) == left


@pytest.mark.parametrize(
    ("own", "file", "text"),
    [
        ("0::/job", "job/memory.events", "oom 1\noom_kill 3\n"),
        ("0::/not/seen/here", "memory.events", "oom_kill 3\n"),
        ("4:memory:/job\n1:cpu:/", "memory/job/memory.oom_control", "under_oom 0\noom_kill 3\n"),
    ],
)
def test_out_of_memory_kills_of_the_control_group(tmp_path: Path, own: str, file: str, text: str) -> None:
    (tmp_path / "own").write_text(own)
    assert cgroup.oom_kills(tmp_path, tmp_path / "own") is None
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert cgroup.oom_kills(tmp_path, tmp_path / "own") == 3
    assert cgroup.limit(tmp_path, tmp_path / "own") is None
    (tmp_path / file).with_name("memory.max").write_text(str(2**30))
    assert cgroup.limit(tmp_path, tmp_path / "own") == 2**30
    (tmp_path / file).parent.with_name("memory.max").write_text(str(2**29))  # of the group around it, if it has one
    is_inside = (tmp_path / file).parent != tmp_path
    assert cgroup.limit(tmp_path, tmp_path / "own") == (2**29 if is_inside else 2**30)


def test_a_kill_for_lack_of_memory_explains_only_what_ends_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, memory = [2], Memory()
    monkeypatch.setattr(cgroup, "oom_kills", lambda: counted[0])
    memory.look()
    assert not memory.has_run_out()
    counted[0] = 3
    assert memory.has_run_out()
    for _ in range(25):
        memory.look()
    assert not memory.has_run_out()


# ---- stragglers -----------------------------------------------------------------------------------------------------


def test_the_rank_that_arrives_last_and_its_cost() -> None:
    """Thirty steps of 50 ms with two collectives each: rank 2 comes 20 ms late, and delays do not add up."""
    samples: dict[int, dict[tuple[str, int], int]] = {0: {}, 1: {}, 2: {}}
    for step in range(30):
        for part in range(2):
            for rank in samples:
                at = 1000 * step * 50_000 + 1000 * part * 2000 + (20_000_000 if rank == 2 else rank * 10_000)
                samples[rank]["1", 2 * step + part] = at
    samples[0]["1", 99] = 0  # not yet entered by the others
    samples[0]["2", 1] = 0  # a group of which only one rank is seen
    arrivals = Arrivals()
    assert arrivals.straggler() is None
    arrivals.add(samples, step_seconds=0.05)
    found = arrivals.straggler()
    assert found is not None
    assert (found.rank, found.collectives, found.last_fraction) == (2, 60, 1.0)
    assert found.stands_out
    assert found.late_seconds == pytest.approx(0.02, rel=0.01)
    assert found.cost_fraction == pytest.approx(0.02 / 0.05, rel=0.15)


def test_ranks_that_are_late_in_turns_do_not_stand_out() -> None:
    samples = {rank: {("1", n): n * 10**7 + (n % 2 == rank) * 10**6 for n in range(60)} for rank in range(2)}
    arrivals = Arrivals()
    arrivals.add(samples, step_seconds=0.01)
    found = arrivals.straggler()
    assert found is not None
    assert not found.stands_out


def test_a_few_collectives_of_one_busy_moment_name_no_rank() -> None:
    """In three of five neighbouring steps rank 0 had no core, and in no other of the run."""
    arrivals = Arrivals()
    for moment in range(12):
        steps = {n: moment * 10**10 + n * 10**7 for n in range(5 * moment, 5 * moment + 5)}
        samples = {r: {("1", n): at + (r == 0 and n < 3) * 8 * 10**6 for n, at in steps.items()} for r in range(2)}
        arrivals.add(samples, step_seconds=0.01)
        assert arrivals.collectives == 5 * (moment + 1)
        assert (arrivals.straggler() is None) == (moment < 11)
    found = arrivals.straggler()
    assert found is not None
    assert found.cost_fraction < 0.1


def test_ranks_that_arrive_together_have_no_straggler() -> None:
    arrivals = Arrivals()
    arrivals.add({rank: {("1", n): n * 10**7 + rank * 1000 for n in range(90)} for rank in range(3)}, step_seconds=0.01)
    assert arrivals.straggler() is None
