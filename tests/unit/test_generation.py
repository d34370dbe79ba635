"""One generation on two hosts, whose reports are given: which failure is reported, and who is stopped."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import pytest

from shoal.blueprint.plan import Plan
from shoal.elastic.replan import plan_for_ranks
from shoal.errors import RunFailed
from shoal.launch.failure import Failure
from shoal.launch.hosts import generation as module
from shoal.launch.hosts.generation import Generation, Grown, Job
from shoal.launch.hosts.hostlist import HostSpec
from shoal.launch.hosts.members import Member
from tests.rejects import rejects


class FakeMembers:
    """Hosts that report what a test lets them report, one event a turn."""

    def __init__(self) -> None:
        self.members = [Member(HostSpec("a", 2)), Member(HostSpec("b", 2))]
        for member in self.members:
            member.channel = object()  # type: ignore[assignment]
        self.events: list[Any] = []
        self.sent: list[tuple[str, Any]] = []
        self.said: list[str] = []
        self.say = self.said.append
        self.shows_plain: Member | None = None
        self.has_begun = False

    def send(self, members: list[Member], message: Any) -> None:
        self.sent += [(member.name, message) for member in members]
        if message["do"] == "stop":
            self.events += [(member, {"say": "stopped", "generation": 1}) for member in members]

    def turn(self, seconds: float = 0.1) -> list[Any]:
        time.sleep(0.005)
        return [self.events.pop(0)] if self.events else []


@pytest.fixture
def all_hosts(monkeypatch: pytest.MonkeyPatch) -> FakeMembers:
    monkeypatch.setattr(module, "SETTLE", 0.05)
    monkeypatch.setattr(module, "SETTLE_ON_ECHO", 0.3)
    return FakeMembers()


def generation(hosts: FakeMembers, *, names: str = "ab", signals: list[int] | None = None) -> Generation:
    job = Job(words=["r.yaml"], recipe=None, name="run", grace_period=1.0, start_time=0.0, plan_for=lambda ranks: None)
    used = [member for member in hosts.members if member.name in names]
    return Generation(1, hosts, used, job, ("10.0.0.1", 29401), signals or [], revive=lambda: None)  # type: ignore[arg-type]


def failed(rank: int, what: str, *, number: int = 1, **more: Any) -> dict[str, Any]:
    failure = asdict(Failure(code="N022", rank=rank, at=0.0, what=what, **more))
    return {"say": "failed", "generation": number, "failure": failure, "error": None, "saved_step": rank}


def test_the_cause_is_reported_and_not_its_echo(all_hosts: FakeMembers) -> None:
    a, b = all_hosts.members
    all_hosts.events = [
        (b, failed(2, "of a generation before", number=0)),
        (b, failed(2, "Connection closed by peer", is_echo=True)),
        (a, failed(1, "ZeroDivisionError", may_pass=True)),
    ]
    began = time.monotonic()
    with rejects("N022", "rank 1 of 4 (host a) failed: ZeroDivisionError", kind=RunFailed) as caught:
        generation(all_hosts).watch()
    assert time.monotonic() - began < 0.3  # it did not wait as long as for an echo
    assert [name for name, message in all_hosts.sent if message["do"] == "stop"] == ["a", "b"]
    assert isinstance(caught.value, RunFailed)
    assert (caught.value.may_pass, caught.value.saved_step) == (True, 2)


def test_a_lost_host_is_the_cause_of_lost_connections(all_hosts: FakeMembers) -> None:
    a, b = all_hosts.members
    all_hosts.events = [(a, failed(0, "Connection reset by peer", is_echo=True)), (b, {"say": "lost", "why": "gone"})]
    with rejects("N057", "host b (ranks 2 to 3) is lost: gone", kind=RunFailed) as caught:
        generation(all_hosts).watch()
    assert caught.value.may_pass  # type: ignore[attr-defined]


def test_an_error_of_the_user_is_raised_as_it_is(all_hosts: FakeMembers) -> None:
    error = {"title": "", "problems": [["D033", "too few outputs", "--x 1"]], "has_failed": False, "may_pass": False}
    all_hosts.events = [(all_hosts.members[1], {**failed(3, "ShoalError"), "error": error})]
    with rejects("D033", "too few outputs"):
        generation(all_hosts).watch()


def test_the_first_signal_is_passed_on_and_the_second_kills(all_hosts: FakeMembers) -> None:
    with pytest.raises(KeyboardInterrupt):
        generation(all_hosts, signals=[2, 2]).watch()
    orders = [message["do"] for name, message in all_hosts.sent if name == "b"]
    assert orders == ["signal", "stop"]


def test_a_host_that_is_back_loads_the_job_and_then_all_save(all_hosts: FakeMembers) -> None:
    a, b = all_hosts.members
    done = {"say": "ended", "generation": 1, "outcome": "done", "value": {"was_stopped": True}}
    all_hosts.events = [(b, {"say": "joined"}), (b, {"say": "prepared", "generation": 1, "plan": "x"}), (a, done)]
    with pytest.raises(Grown):
        generation(all_hosts, names="a").watch()
    (to_b, prepare), (to_a, signal) = all_hosts.sent
    assert (to_b, prepare["do"], prepare["world_size"], prepare["first_rank"]) == ("b", "prepare", 4, 2)
    assert (to_a, signal) == ("a", {"do": "signal", "number": 15})


def test_hosts_with_other_recipes_or_devices_are_rejected(all_hosts: FakeMembers) -> None:
    a, b = all_hosts.members
    about = {"say": "prepared", "generation": 1, "plan": "p", "recipe": "1f", "device": "cpu"}
    all_hosts.events = [(a, about), (b, {**about, "device": "cuda"})]
    with rejects("N059", "host b has another device than host a: cuda against cpu"):
        generation(all_hosts).prepare()
    all_hosts.events = [(a, about), (b, {**about, "plan": "q"}), (b, about)]
    generation(all_hosts).prepare()  # the plan of the first host is given to the other
    assert all_hosts.sent[-1][1]["plan"] == "p"


@pytest.mark.parametrize(
    ("plan", "ranks", "expected"),
    [
        ("dp_replicate=4", 2, "dp_replicate=2 zero=0"),
        ("fp64", 1, "zero=0 fp64"),
        ("tp=2 dp_replicate=2", 2, "tp=2 zero=0"),
        ("zero=3 dp_shard=4 dp_replicate=2", 4, "dp_shard=4 zero=3"),
        ("zero=3 dp_shard=4", 2, "dp_shard=2 zero=3"),
    ],
)
def test_a_plan_keeps_its_split_of_the_model(plan: str, ranks: int, expected: str) -> None:
    assert plan_for_ranks(Plan.parse(plan), ranks, batch=12 if ranks < 4 else 16).brief() == expected


def test_a_plan_that_does_not_fit_says_what_would() -> None:
    with rejects("N064", "batch 8 does not fit the 3 ranks", "it fits 1, 2 or 4 ranks"):
        plan_for_ranks(Plan.parse("dp_replicate=4"), 3, batch=8)
