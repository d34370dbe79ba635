"""The parts of a step: own times that add to the step, waits that are split by arrival, and the verdict."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.blueprint.plan import Plan
from shoal.cli.reports.profile import show_profile
from shoal.comm.profile.axis_overlap import by_axis
from shoal.comm.profile.timer import NOTHING, PartTimer, Span, Step, current, enter, part, timed_items, waiting
from shoal.observe.profile.partition import partition
from shoal.observe.profile.profile import Profile
from shoal.observe.profile.record import RankRecord
from shoal.observe.profile.verdict import Verdict
from shoal.planner.changes.next_change import next_change
from shoal.planner.task import Task
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.presets.models import find_model


class Clock:
    """A clock that a test sets."""

    now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    current.timer = PartTimer(clock)
    current.timer.begin_step()
    yield clock
    current.timer = None


def own_times(step: Step) -> dict[str, int]:
    return {span.name: span.own for span in step.spans}


def test_the_innermost_part_gets_the_time(clock: Clock) -> None:
    timer = current.timer
    assert timer is not None
    clock.now = 10
    with part("backward"):
        clock.now = 30
        with waiting("tp", enter("1")):
            clock.now = 35
        clock.now = 50
    clock.now = 57
    timer.end_step()
    assert own_times(timer.steps[0]) == {"tp": 5, "backward": 35, "other": 17}
    assert timer.entered == {"1|1": 30}


def test_parts_that_a_generator_leaves_open_end_with_the_step(clock: Clock) -> None:
    timer = current.timer
    assert timer is not None
    left = part("forward")
    left.__enter__()
    clock.now = 4
    timer.end_step()
    clock.now = 9
    left.__exit__(None, None, None)  # in the next step: it has ended already
    timer.end_step()
    assert [own_times(step) for step in timer.steps] == [{"forward": 4, "other": 0}, {"other": 5}]


def test_items_are_timed_and_other_threads_are_not(clock: Clock) -> None:
    timer = current.timer
    assert timer is not None

    def items() -> Iterator[int]:
        clock.now += 7
        yield 1

    assert list(timed_items("data", items())) == [1]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(part("forward")))
    thread.start()
    thread.join()
    assert found == [NOTHING]
    timer.end_step()
    assert sum(span.own for span in timer.steps[0].spans if span.name == "data") == 7


def test_without_a_timer_a_part_is_nothing() -> None:
    assert part("forward") is waiting("tp", None) is NOTHING
    assert enter("1") is None


def record(rank: int, waits: list[Span], entered: dict[str, int], **more: Any) -> RankRecord:
    step = Span("other", 0, end=100_000_000, inner=sum(wait.end - wait.begin for wait in waits))
    about: dict[str, Any] = {"host": "a", "place": {"tp": rank}, "threads": 1, "cores": 8, "delay": 0, **more}
    delay = about.pop("delay")
    return RankRecord(rank=rank, steps=[Step([*waits, step], delay)], entered=entered, **about)


def test_a_wait_is_for_the_last_rank_and_then_for_the_wire() -> None:
    waits = [
        [Span("tp", 10_000_000, "1|1", is_wait=True, end=60_000_000)],
        [Span("tp", 40_000_000, "1|1", is_wait=True, end=60_000_000)],
    ]
    arrived = [{"1|1": 10_000_000}, {"1|1": 40_000_000}]
    ranks = partition([record(rank, waits[rank], arrived[rank]) for rank in range(2)])
    assert ranks[0].steps == [{"tp.late": pytest.approx(0.03), "tp.wire": pytest.approx(0.02), "other": 0.05}]
    assert ranks[1].steps == [{"tp.wire": pytest.approx(0.02), "other": pytest.approx(0.08)}]
    assert ranks[0].late_for == {1: pytest.approx(0.03)}
    elsewhere = partition([record(rank, waits[rank], arrived[rank], host=str(rank)) for rank in range(2)])
    assert elsewhere[0].steps == [{"tp.wait": pytest.approx(0.05), "other": 0.05}]
    stages = partition([record(rank, waits[rank], arrived[rank], place={"pp": rank}) for rank in range(2)])
    assert stages[0].steps[0]["bubble"] == pytest.approx(0.03)


def test_an_evaluation_between_two_steps_is_part_of_neither(clock: Clock) -> None:
    timer = current.timer
    assert timer is not None
    clock.now = 10_000_000
    with part("evaluation"):
        clock.now = 50_000_000
        with part("forward"), waiting("world", enter("1")):
            clock.now = 70_000_000
    with part("forward"):
        clock.now = 100_000_000
    timer.end_step()
    (rank,) = partition([RankRecord(0, "a", {}, 1, 8, timer.steps, timer.entered)])
    assert rank.steps == [{"forward": pytest.approx(0.03), "other": pytest.approx(0.01)}]
    assert rank.seconds == [pytest.approx(0.04)]


def test_the_measured_peak_is_that_of_the_fullest_rank() -> None:
    """A prediction is of that rank, which under pp need not be the first one."""
    ranks = [record(rank, [], {}, peak=peak) for rank, peak in enumerate((100 << 20, 300 << 20))]
    found = Profile.of(ranks, more={"memory": {"predicted": {"total": 280 << 20}}, "is_calibrated": False})
    said = found.to_mapping()
    assert (said["memory"]["measured_peak"], said["memory"]["fullest_rank"]) == (300 << 20, 1)
    assert [rank["peak_bytes"] for rank in said["ranks"]] == [100 << 20, 300 << 20]
    out = io.StringIO()
    show_profile({**said, "ranks_count": 2, "trace": None}, as_json=False, out=out)
    assert "300 MiB at the peak of the fullest rank, 1, 280 MiB predicted" in out.getvalue()
    assert "predicted from rates of presets" in out.getvalue()


def test_waits_for_small_buckets_are_told_from_a_slow_link() -> None:
    def verdict(**sent: int) -> Verdict:
        waits = [Span("dp_replicate", 10_000_000, "1|1", is_wait=True, end=60_000_000)]
        ranks = [record(rank, waits, {"1|1": 10_000_000}, place={"dp_replicate": rank}, **sent) for rank in range(2)]
        return Profile.of(ranks).verdict

    found = verdict(messages=50, bytes=200_000)
    assert (found.kind, found.title, found.axis) == ("bucket", "buckets too small", "dp_replicate")
    assert found.cost == pytest.approx(0.5)
    assert "waits 50% of a step on the wire, for 50 messages of 4.0 kB" in found.evidence
    assert "bucket_mb=25" in found.next
    assert {verdict(messages=1, bytes=4_000).kind, verdict(messages=50, bytes=2**23).kind, verdict().kind} == {"link"}


def test_a_rank_that_saves_longer_is_no_straggler() -> None:
    """Rank 0 writes alone while rank 1 waits at the next collective; waits inside of a save are saving, too."""
    spans = [
        [Span("save", 0, end=60_000_000)],
        [Span("tp", 0, "1|1", is_wait=True, end=60_000_000)],
    ]
    arrived = [{"1|1": 60_000_000}, {"1|1": 0}]
    found = Profile.of([record(rank, spans[rank], arrived[rank]) for rank in range(2)])
    assert found.verdict.kind == "saving"
    assert found.verdict.evidence == "the other ranks wait 60% of a step for rank 0, which spends 60 ms more in save"


def test_waits_inside_of_a_save_are_saving(clock: Clock) -> None:
    timer = current.timer
    assert timer is not None
    with part("save"), waiting("world", enter("1")):
        clock.now = 5
    timer.end_step()
    assert own_times(timer.steps[0]) == {"save": 5, "other": 0}


def test_communication_is_hidden_until_it_is_waited_for() -> None:
    spans = [
        Span("tp", 50, "1|1", is_wait=True, end=60),  # started at 10, over at 60
        Span("tp", 90, "1|2", is_wait=True, end=91),  # started at 65, over at 85
        Span("pp", 20, "m|1", is_wait=True, end=40),  # a message: until it was waited for
        Span("world", 0, "w|1", is_wait=True, end=99),
        Span("forward", 0, end=50),
    ]
    entered = {"1|1": 10, "1|2": 65, "m|1": 20}
    found = by_axis([Step(spans, None)], entered, {"1|1": 60, "1|2": 85})
    assert set(found) == {"tp", "pp"}
    assert found["tp"].seconds == pytest.approx(71e-9)  # 10 to 60, 65 to 85, and the wait from 90 to 91
    assert found["tp"].exposed == pytest.approx(11e-9)
    assert found["tp"].hidden == pytest.approx(60 / 71)
    assert found["pp"].hidden == 0


def test_a_profile_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    waits = [[Span("dp_replicate", begin, "1|1", is_wait=True, end=60_000_000)] for begin in (10_000_000, 40_000_000)]
    entered = [{"1|1": wait[0].begin} for wait in waits]
    made = Profile.of([record(rank, waits[rank], entered[rank]) for rank in range(2)], predicted={"other": 0.05})
    found = {**made.to_mapping(), "ranks_count": 2, "trace": None, "plan": "dp_replicate=2"}
    out = io.StringIO()
    show_profile(found, as_json=False, out=out)
    table = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    assert table[0].startswith("│ dp_replicate, for a late rank │")
    assert max(map(len, table)) <= 80
    assert f"verdict   {made.verdict.title}: {made.verdict.evidence}\n" in out.getvalue()


def test_threads_without_a_core_are_the_verdict() -> None:
    found = Profile.of([record(rank, [], {}, threads=8, delay=60_000_000) for rank in range(2)])
    assert found.verdict.kind == "cores"
    assert str(found).splitlines()[:2] == ["other    100.0 ms 100.0%", "step     100.0 ms"]
    assert found.verdict.evidence == "ranks wait 60% of a step for a core: 2 ranks x 8 threads on 8 cores"
    assert Profile.of([record(0, [], {})]).verdict.kind == "compute"


def test_the_planner_prices_the_next_change() -> None:
    cluster = parse_cluster("h100:8x2")
    task = Task(workload=find_model("llama3-8b"), cluster=cluster, sequence=4096, global_batch=64)
    plan = Plan.parse("zero=3 bf16 mb=1 recompute=full").resolve(16)
    found = next_change(task, plan, "recompute")
    assert found is not None
    assert found.words.startswith("recompute=")
    assert found.instead_of == "recompute=full"
    assert 0.02 < found.saved < 0.4
    assert next_change(task, plan, "bubble") is None
