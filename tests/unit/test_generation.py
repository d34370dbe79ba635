"""One generation on two hosts, whose reports are given: which failure is reported, and who is stopped."""

from __future__ import annotations

import subprocess
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.blueprint.plan import Plan
from shoal.elastic.replan import fits_some_way, plan_for_ranks
from shoal.errors import RunFailed
from shoal.launch.failure import Failure
from shoal.launch.hosts import generation as module
from shoal.launch.hosts.agent import token_file
from shoal.launch.hosts.coordinator import Coordinator, check_shared_folder
from shoal.launch.hosts.generation import Generation, Grown, Job
from shoal.launch.hosts.hostlist import HostSpec
from shoal.launch.hosts.members import Member
from shoal.launch.hosts.ssh import Command
from tests.rejects import rejects


class FakeMembers:
    """Hosts that report what a test lets them report, one event a turn."""

    def __init__(self, names: str = "ab", slots: int = 2) -> None:
        self.members = [Member(HostSpec(name, slots)) for name in names]
        for member in self.members:
            member.channel = object()  # type: ignore[assignment]
        self.events: list[Any] = []
        self.sent: list[tuple[str, Any]] = []
        self.said: list[str] = []
        self.say = self.said.append
        self.shows_plain: Member | None = None
        self.has_begun = False
        self.listener = self.listening = SimpleNamespace(rejected=set(), getsockname=lambda: ("10.0.0.1", 29400))

    @property
    def usable(self) -> list[Member]:
        return [member for member in self.members if member.is_here and not member.is_left_out]

    def send(self, members: list[Member], message: Any) -> None:
        self.sent += [(member.name, message) for member in members]
        if message["do"] == "stop":  # the runners report the signal that has ended their workers
            killed = {"say": "ended", "generation": 1, "outcome": "killed", "signal": 15}
            self.events += [(member, killed) for member in members]
            self.events += [(member, {"say": "stopped", "generation": 1}) for member in members]

    def turn(self, seconds: float = 0.1) -> list[Any]:
        time.sleep(0.005)
        happened = [self.events.pop(0)] if self.events else []
        for member, event in happened:
            if event["say"] in ("joined", "lost"):
                member.channel = object() if event["say"] == "joined" else None
        return happened


@pytest.fixture
def all_hosts(monkeypatch: pytest.MonkeyPatch) -> FakeMembers:
    monkeypatch.setattr(module, "SETTLE", 0.05)
    monkeypatch.setattr(module, "SETTLE_ON_ECHO", 0.3)
    return FakeMembers()


def plan_for(num_ranks: int) -> str | None:
    return str(plan_for_ranks(Plan.parse("dp_replicate=4"), num_ranks, batch=8))


def fits(num_ranks: int) -> bool:
    return fits_some_way(Plan.parse("dp_replicate=4"), num_ranks, batch=8)


def job(**more: Any) -> Job:
    usual = {"plan_for": lambda ranks: None, **more}
    return Job(words=["r.yaml"], recipe=None, name="run", grace_period=1.0, start_time=0.0, **usual)


def generation(
    hosts: FakeMembers,
    *,
    names: str = "ab",
    signals: list[int] | None = None,
    given: Job | None = None,
    timeout: float = 60,
) -> Generation:
    used = [member for member in hosts.members if member.name in names]
    where = ("10.0.0.1", 29401)
    return Generation(1, hosts, used, given or job(), where, signals or [], lambda: None, timeout=timeout)  # type: ignore[arg-type]


def ended(*, was_stopped: bool, number: int = 1) -> dict[str, Any]:
    return {"say": "ended", "generation": number, "outcome": "done", "value": {"was_stopped": was_stopped}}


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


def test_the_first_signal_of_a_user_while_workers_save_for_a_host_that_is_back(all_hosts: FakeMembers) -> None:
    """The workers had a SIGTERM already. A second signal would kill them before they have saved."""
    a, _ = all_hosts.members
    done = {"say": "ended", "generation": 1, "outcome": "done", "value": {"was_stopped": True}}
    all_hosts.events = [(a, done)]
    growing = generation(all_hosts, names="a", signals=[2])
    growing.grows = True
    assert growing.watch() == {"was_stopped": True}  # the run ends, as the user wants it
    assert all_hosts.sent == []
    all_hosts.events = [(a, {"say": "ended", "generation": 1, "outcome": "killed", "signal": 15})]
    growing = generation(all_hosts, names="a")
    growing.grows = True
    with pytest.raises(Grown):  # too slow to save: no reason to end the run
        growing.watch()


def test_a_host_that_is_back_waits_until_a_plan_fits() -> None:
    """It had ended the run: three ranks do not divide a batch of 8, and the error left `watch`."""
    hosts = FakeMembers("abcd", slots=1)
    a, b, c, d = hosts.members
    c.channel = d.channel = None
    hosts.events = [(c, {"say": "joined"}), (d, {"say": "joined"})]
    hosts.events += [(each, {"say": "prepared", "generation": 1, "plan": "x"}) for each in (c, d)]
    hosts.events += [(each, ended(was_stopped=True)) for each in (a, b)]
    with pytest.raises(Grown):
        generation(hosts, names="ab", given=job(plan_for=plan_for, fits=fits)).watch()
    assert "host c is back, and waits for others: the plan dp_replicate=4" in hosts.said[0]
    assert "it fits 1, 2 or 4 ranks" in hosts.said[0]
    assert [(name, order["do"]) for name, order in hosts.sent] == [
        *[("c", "prepare"), ("d", "prepare")],
        *[("a", "signal"), ("b", "signal")],
    ]
    assert [order["first_rank"] for _, order in hosts.sent[:2]] == [2, 3]
    assert hosts.said[1:] == ["hosts c, d are back: saving, to continue on 4 hosts"]


def test_a_host_that_joins_before_the_start_takes_part_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent joined while the others loaded the job. It had been left alone until the next failure."""
    hosts = FakeMembers("abc", slots=1)
    a, b, c = hosts.members
    c.channel = None
    begun = generation(hosts, names="ab")
    prepared = {"say": "prepared", "plan": "x", "recipe": "1f", "device": "cpu"}
    hosts.events = [(a, prepared), (c, {"say": "joined"}), (b, prepared)]
    begun.prepare()
    assert hosts.events == []
    monkeypatch.setattr(hosts, "send", lambda members, order: orders.append((members, order["do"])))
    orders: list[Any] = []
    hosts.turn = lambda seconds=0.1: [(c, prepared)] if orders == [([c], "prepare")] else on_signal()  # type: ignore[method-assign]

    def on_signal() -> list[Any]:
        assert orders, "nothing was sent to the host that has joined"
        return [(each, ended(was_stopped=True)) for each in (a, b)]

    with pytest.raises(Grown):
        begun.watch()
    assert orders == [([c], "prepare"), ([a, b], "signal")]
    assert hosts.said == ["host c is back: saving, to continue on 3 hosts"]


def test_a_host_that_joins_before_the_start_and_is_lost_again_is_not_waited_for() -> None:
    hosts = FakeMembers("abc", slots=1)
    a, b, c = hosts.members
    begun = generation(hosts, names="ab")
    hosts.events = [(c, {"say": "joined"}), (c, {"say": "lost", "why": "gone"})]
    begun.wait_until(time.monotonic() + 0.1)
    hosts.events = [(each, ended(was_stopped=False)) for each in (a, b)]
    assert begun.watch() == {"was_stopped": False}
    assert (hosts.said, hosts.sent) == ([], [])


def test_one_of_two_hosts_that_are_back_cannot_load_the_job() -> None:
    hosts = FakeMembers("abcd", slots=1)
    a, b, c, d = hosts.members
    c.channel = d.channel = None
    error = {"title": "", "problems": [["N059", "no recipe", "scp"]], "has_failed": False, "may_pass": False}
    hosts.events = [(c, {"say": "joined"}), (d, {"say": "joined"})]
    hosts.events += [
        (c, {"say": "prepared", "generation": 1}),
        (d, {"say": "rejected", "generation": 1, "error": error}),
    ]
    hosts.events += [(each, ended(was_stopped=False)) for each in (a, b)]
    assert generation(hosts, names="ab", given=job(plan_for=plan_for, fits=fits)).watch() == {"was_stopped": False}
    assert [order["do"] for _, order in hosts.sent] == ["prepare", "prepare"]


@pytest.mark.parametrize(
    ("names", "shares_disk", "min_hosts", "expected"),
    [("abc", True, 1, "ab"), ("abcd", True, 1, "abcd"), ("abc", True, 3, "abc"), ("abc", False, 1, "abc")],
)
def test_after_a_loss_as_many_hosts_continue_as_a_plan_fits(
    names: str, shares_disk: bool, min_hosts: int, expected: str
) -> None:
    hosts = FakeMembers(names, slots=1)
    given = job(plan_for=plan_for, fits=fits)
    coordinator = Coordinator(hosts, None, given, "none", "", None, 1.0, min_hosts)  # type: ignore[arg-type]
    coordinator.shares_disk = shares_disk
    assert "".join(host.name for host in coordinator._hosts_to_use()) == expected
    assert ["waiting for others: c; the plan" in text for text in hosts.said] == [True] * (expected == "ab")


def test_a_host_that_is_stopped_while_workers_save_for_one_that_is_back(all_hosts: FakeMembers) -> None:
    a, b = all_hosts.members
    all_hosts.events = [
        (b, {"say": "joined"}),
        (b, {"say": "prepared", "generation": 1}),
        (a, {"say": "signaled", "generation": 1, "number": 15}),
        (a, ended(was_stopped=True)),
    ]
    assert generation(all_hosts, names="a").watch() == {"was_stopped": True}


def test_a_host_that_is_lost_after_a_signal_restarts_nothing(all_hosts: FakeMembers) -> None:
    all_hosts.events = [(all_hosts.members[1], {"say": "lost", "why": "gone"})]
    with pytest.raises(SystemExit, match="143"):
        generation(all_hosts, signals=[15]).watch()
    assert "host b (ranks 2 to 3) is lost: gone" in all_hosts.said[0]


def test_a_failure_after_the_signal_of_an_agent_restarts_nothing(all_hosts: FakeMembers) -> None:
    """A scheduler signals the agent of one host, and a rank fails before the last save is made."""
    a, b = all_hosts.members
    all_hosts.events = [
        (b, {"say": "signaled", "generation": 1, "number": 15}),
        (a, failed(0, "OSError: disk", may_pass=True)),
    ]
    with pytest.raises(SystemExit, match="143"):
        generation(all_hosts).watch()
    assert "not restarted: the run was being stopped" in all_hosts.said[0]


def test_a_host_whose_workers_a_signal_has_killed_restarts_nothing(all_hosts: FakeMembers) -> None:
    """A signal to its agent before the first step. The run had restarted from the echo on the other host."""
    a, b = all_hosts.members
    all_hosts.events = [
        (a, failed(0, "Connection closed by peer", is_echo=True, may_pass=True)),
        (b, {"say": "ended", "generation": 1, "outcome": "killed", "signal": 15}),
    ]
    with pytest.raises(SystemExit, match="143"):
        generation(all_hosts).watch()
    assert "not restarted: the run was being stopped" in all_hosts.said[0]


def test_a_host_that_does_not_load_the_job_is_named(all_hosts: FakeMembers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent lives and sends heartbeats, but the process that loads the job hangs."""
    monkeypatch.setattr(module, "SECONDS_TO_NOTE", 0.1)
    a, b = all_hosts.members
    all_hosts.events = [(a, {"say": "prepared", "generation": 1, "plan": "x"})]
    hung = generation(all_hosts, timeout=0.3)
    with rejects("N057", "host b (ranks 2 to 3) did not load the job within launch.timeout, 0.3 s", kind=RunFailed):
        hung.prepare()
    assert all_hosts.said == ["waiting for b to load the job"]
    assert hung.rejected_by is b  # a run that has begun continues without it


def test_a_host_that_joins_again_has_stopped(all_hosts: FakeMembers, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = all_hosts.members
    monkeypatch.setattr(module, "SECONDS_TO_END", 0.5)
    monkeypatch.setattr(all_hosts, "send", lambda members, message: None)
    monkeypatch.setattr(all_hosts, "lose", lambda host, why: pytest.fail(why), raising=False)
    all_hosts.events = [
        (a, {"say": "stopped", "generation": 1}),
        (b, {"say": "lost", "why": "gone"}),
        (b, {"say": "joined"}),
    ]
    generation(all_hosts).stop_all(0.0)


def test_saved_steps_of_a_host_that_is_lost_later_count(all_hosts: FakeMembers) -> None:
    a, _ = all_hosts.members
    all_hosts.events = [
        (a, {"say": "saved", "generation": 1, "saved_step": 7}),
        (a, {"say": "lost", "why": "gone"}),
    ]
    with rejects("N057", "host a", kind=RunFailed) as caught:
        generation(all_hosts).watch()
    assert caught.value.saved_step == 7  # type: ignore[attr-defined]


def test_a_returned_host_that_cannot_run_the_job_is_left_out(all_hosts: FakeMembers) -> None:
    a, b = all_hosts.members
    done = {"say": "ended", "generation": 1, "outcome": "done", "value": {"was_stopped": False}}
    error = {"title": "", "problems": [["N059", "no recipe", "scp"]], "has_failed": False, "may_pass": False}
    rejected = {"say": "rejected", "generation": 1, "error": error}
    all_hosts.events = [(b, {"say": "joined"}), (b, rejected), (a, done)]
    generation(all_hosts, names="a").watch()
    assert b.is_left_out
    assert "no recipe" in all_hosts.said[0]
    assert "host b is left out" in all_hosts.said[0]


@pytest.mark.parametrize(
    ("rejects_it", "had_run", "min_hosts", "expected"),
    [("b", "a", 1, True), ("b", "a", 2, False), ("b", "ab", 1, False), ("b", "", 1, False)],
)
def test_which_host_a_run_can_do_without(
    all_hosts: FakeMembers, rejects_it: str, had_run: str, min_hosts: int, expected: bool
) -> None:
    coordinator = Coordinator(all_hosts, None, None, "none", "", None, 1.0, min_hosts)  # type: ignore[arg-type]
    coordinator.experienced = {each for each in all_hosts.members if each.name in had_run}
    (host,) = (each for each in all_hosts.members if each.name == rejects_it)
    assert coordinator._can_leave_out(host) == expected


@pytest.mark.parametrize(
    ("lost_at", "began", "is_ended"),
    [(100, 50, False), (80, 50, True), (100, 101, False), (75, 80, True), (0, 1, False)],
)
def test_the_agent_of_a_lost_host_has_time_to_start(
    lost_at: float, began: float, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt was ended by the next one after 5 s: a host that needs longer for ssh and Python never came back,
    and an agent that was cut off for longer was ended before it could join again."""
    hosts = FakeMembers("b")
    (b,) = hosts.members
    b.channel, b.lost_at = None, lost_at
    coordinator = Coordinator(hosts, None, None, "ssh {host}", "", None, 600.0, 1)  # type: ignore[arg-type]
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as process:
        coordinator.commands[b] = Command(b.spec, ["sleep"], process)
        coordinator.commands[b].began = began
        monkeypatch.setattr(time, "monotonic", lambda: 111.0)
        coordinator._end_stale_commands()
        monkeypatch.undo()
        assert (process.poll() is not None) == is_ended
        process.kill()


def test_what_ssh_says_of_a_lost_host_is_shown() -> None:
    """It was tried again every 5 s, and only the name of the host was printed."""
    hosts = FakeMembers("b")
    (b,) = hosts.members
    b.channel = None
    coordinator = Coordinator(hosts, None, None, "ssh {host}", "", None, 600.0, 1, number=3)  # type: ignore[arg-type]
    with subprocess.Popen(
        ["sh", "-c", "echo Host key verification failed.; exit 255"], stdout=subprocess.PIPE
    ) as process:
        process.wait()
        coordinator.commands[b] = Command(b.spec, ["ssh", "b", "sh", "-c", "..."], process)
        coordinator.commands[b].read()
        text = coordinator._waiting_for([b])
    assert text.startswith("waiting for b; the agent of host b cannot be started: exit code 255: Host key verification")


@pytest.mark.parametrize("is_shared", [True, False])
def test_hosts_that_do_not_share_the_checkpoints_are_named(
    all_hosts: FakeMembers, is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file, "SECONDS", 0.2)
    folders = {"a": tmp_path / "a", "b": tmp_path / ("a" if is_shared else "b")}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    orders = []

    def send(members: list[Member], message: Any) -> None:
        for member in members:
            monkeypatch.chdir(folders[member.name])
            orders.append((member.name, message["do"]))
            all_hosts.events.append((member, {"generation": 1, **token_file.handle(message)}))

    monkeypatch.setattr(all_hosts, "send", send)
    checked = generation(all_hosts)
    checked.prepared = {member: {"saves_to": "runs/one"} for member in all_hosts.members}
    expectation = (
        nullcontext() if is_shared else rejects("N069", "host b (in", "host a writes to 'runs/one'", "--check")
    )
    with expectation:
        check_shared_folder(checked)
    assert orders == [("a", "write token"), ("b", "find token"), ("a", "remove token")]
    assert (checked.rejected_by is None) == is_shared
    assert [path for folder in folders.values() for path in folder.iterdir()] == []
    orders.clear()
    for alone, saves_to in ((True, "runs"), (False, "")):  # one host, and an object store
        checked = generation(all_hosts, names="a" if alone else "ab")
        checked.prepared = {member: {"saves_to": saves_to} for member in all_hosts.members}
        check_shared_folder(checked)
    assert orders == []


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
