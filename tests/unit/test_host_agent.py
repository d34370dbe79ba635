"""The agent of one host with a template that a test plays: no process outlives the coordinator that ordered it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import Problem, RunFailed
from shoal.launch.failure import Failure
from shoal.launch.hosts import lease
from shoal.launch.hosts.agent.loop import Agent, Runner, Silent
from shoal.launch.hosts.agent.runner import HostGroup
from shoal.launch.hosts.lease import LEASE, Lease, boottime
from shoal.launch.hosts.messages import MOST, Channel
from shoal.launch.hosts.reports import MOST_REPORT, encoded, error_from, plain_error
from shoal.launch.watch.verdict import Verdict
from shoal.launch.watch.watcher import Watcher
from shoal.launch.worker import saved_path

KEY = b"k" * 32
START = {"do": "start", "num_local": 1, "world_size": 1}
"""An order, but for the number of its generation."""


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that end only by a signal: a template and a runner."""
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield started
    for each in started:
        each.kill()
        each.wait()


@pytest.fixture
def played(sleepers: list[subprocess.Popen[bytes]]) -> Iterator[tuple[Agent, socket.socket, Channel]]:
    """An agent, the end of its template's link, and the coordinator's channel."""
    near, far = socket.socketpair()
    link, template = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = Agent(KEY, prepare=lambda order: pytest.fail("nothing to prepare"))
    for each in (near, far):
        each.setblocking(False)
    agent.channel, agent.link, agent.template = Channel(near, KEY, KEY), link, sleepers[0].pid
    yield agent, template, Channel(far, KEY, KEY)
    agent.close()
    for end in (near, far, link, template):
        end.close()


def say(template: socket.socket, agent: Agent, **report: Any) -> None:
    template.send(json.dumps({"generation": 1, **report}).encode())
    agent._hear_template()


def test_a_coordinator_that_is_lost_before_the_start_is_reported(
    played: tuple[Agent, socket.socket, Channel], sleepers: list[subprocess.Popen[bytes]]
) -> None:
    agent, _, _ = played
    agent._obey({**START, "generation": 1})
    agent.lose_coordinator()
    assert agent.link is None
    assert agent.runner is None
    assert sleepers[0].poll() is not None  # reaped; its death ends the runner that it may have forked


@pytest.mark.parametrize("current", [None, 2])
def test_a_runner_that_starts_too_late_is_killed(
    played: tuple[Agent, socket.socket, Channel], sleepers: list[subprocess.Popen[bytes]], current: int | None
) -> None:
    agent, template, _ = played
    if current is not None:
        agent._obey({**START, "generation": current})
    say(template, agent, say="started", pid=sleepers[1].pid)
    assert sleepers[1].wait(5) == -signal.SIGKILL


def test_an_agent_passes_a_hang_up_on_as_a_stop(
    played: tuple[Agent, socket.socket, Channel], sleepers: list[subprocess.Popen[bytes]]
) -> None:
    agent, template, coordinator = played
    agent._obey({**START, "generation": 1})
    say(template, agent, say="started", pid=sleepers[1].pid)
    say(template, agent, say="saved", saved_step=3)
    assert coordinator.read() == [{"say": "saved", "generation": 1, "saved_step": 3}]
    assert agent.runner is not None
    assert not agent.runner.has_reported  # else its sudden end would not be reported
    agent._obey({"do": "signal", "number": int(signal.SIGHUP)})
    assert sleepers[1].wait(5) == -signal.SIGTERM


def test_no_worker_starts_at_the_order_of_a_leader_that_was_asleep(
    played: tuple[Agent, socket.socket, Channel], sleepers: list[subprocess.Popen[bytes]]
) -> None:
    agent, template, _ = played
    template.setblocking(False)
    agent.lease = Lease()
    with pytest.raises(Silent):
        agent._obey({**START, "generation": 1})
    agent._obey({"do": "leads", "at": boottime() - LEASE})
    with pytest.raises(Silent):
        agent._obey({**START, "generation": 1})
    with pytest.raises(BlockingIOError):
        template.recv(1)
    agent._obey({"do": "leads", "at": boottime()})
    agent._obey({**START, "generation": 1})
    assert json.loads(template.recv(1000))["do"] == "start"


@pytest.mark.parametrize("has_workers", [False, True])
def test_an_agent_leaves_a_leader_that_is_asleep(
    played: tuple[Agent, socket.socket, Channel],
    sleepers: list[subprocess.Popen[bytes]],
    has_workers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease, "LEASE", 0.4)
    agent, template, _ = played
    agent.lease = Lease()
    agent._obey({"do": "leads", "at": boottime()})
    if has_workers:
        agent._obey({**START, "generation": 1})
        say(template, agent, say="started", pid=sleepers[1].pid)
    assert agent.channel is not None
    began = time.monotonic()
    with pytest.raises(Silent):  # its host answers, as the other end of this connection does
        agent.serve(agent.channel)
    assert 0.3 < time.monotonic() - began < 2.5  # without a lease after 3 s
    agent.lose_coordinator()
    assert not has_workers or sleepers[1].wait(5) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("are_own", "num_sent"),
    [([False, True], 1), ([True, False], 1), ([True, True], 2), ([False, True, True], 2), ([False, False], 1)],
)
def test_a_signal_to_coordinator_and_agent_is_one_request(
    are_own: list[bool], num_sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner kills its workers at a second signal, before their last save."""
    sent: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append(number))
    runner = Runner(1, pid=4711)
    for is_own in are_own:
        runner.stop(signal.SIGTERM, is_own=is_own)
    assert sent == [signal.SIGTERM] * num_sent


def test_a_signal_before_the_start_is_reported_is_kept(
    played: tuple[Agent, socket.socket, Channel], sleepers: list[subprocess.Popen[bytes]]
) -> None:
    agent, template, coordinator = played
    agent._obey({**START, "generation": 1})
    agent.signals.append(signal.SIGTERM)
    agent._turn()
    assert coordinator.read() == [{"say": "signaled", "generation": 1, "number": 15}]
    say(template, agent, say="started", pid=sleepers[1].pid)
    assert sleepers[1].wait(5) == -signal.SIGTERM


def test_a_signal_in_the_moment_in_which_workers_end_is_kept(
    played: tuple[Agent, socket.socket, Channel], sleepers: list[subprocess.Popen[bytes]]
) -> None:
    """Another host has failed, so all restart. The signal was gone, and the scheduler killed the next workers."""
    agent, template, coordinator = played
    agent._obey({**START, "generation": 1})
    agent.signals.append(signal.SIGTERM)  # the handler has seen the runner, which then ends
    agent._forget_runner()
    agent._turn()
    agent._obey({**START, "generation": 2})
    agent._turn()
    assert coordinator.read() == [{"say": "signaled", "generation": 2, "number": 15}]
    say(template, agent, say="started", generation=2, pid=sleepers[1].pid)
    assert sleepers[1].wait(5) == -signal.SIGTERM


ORPHANS = """
import os, signal, subprocess, time
from shoal.launch.hosts.lifetime import Orphans

orphans = Orphans()
read, write = os.pipe()
template = os.fork()
if template == 0:
    runner = os.fork()
    if runner == 0:
        worker = os.fork()
        if worker == 0:
            os.setpgid(0, 0)
            helper = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
            os.write(write, f"{os.getpid()} {helper.pid} ".encode())
            os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(worker, os.WUNTRACED)
        daemon = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, start_new_session=True)
        os.write(write, f"{daemon.pid} ".encode())
        os._exit(1)
    os.waitpid(runner, 0)
    os.write(write, b"that is all")
    time.sleep(60)
told = b""
while not told.endswith(b"that is all"):
    told += os.read(read, 100)
pids = [template, *map(int, told.split()[:3])]
assert orphans.end(but=template)
print([os.path.exists(f"/proc/{pid}") for pid in pids])
for pid in (template, pids[-1]):
    os.kill(pid, signal.SIGKILL)
"""


def test_a_stopped_worker_of_a_killed_runner_is_ended() -> None:
    """It had stayed, with its memory and its GPU, while the next generation started on its host."""
    done = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout == "[True, False, False, True]\n", done.stderr


def host_group(folder: Path, **others: Any) -> HostGroup:
    """The workers of a host, none of which is started, without orders."""
    orders = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    orders.close()
    return HostGroup(
        **{
            "directory": folder,
            "grace": 1.0,
            "grace_period": 30.0,
            "first_rank": 8,
            "report": lambda failure: None,
            "report_saved": lambda step: None,
            "report_stall": lambda stall: None,
            "orders": orders,
            **others,
        }
    )


def test_workers_report_each_saved_step_and_no_limit_that_did_not_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved: list[int] = []
    group = host_group(tmp_path, report_saved=saved.append)
    for step in (1, 1, 4):
        saved_path(tmp_path).write_text(str(step))
        group._check_running()
    assert saved == [1, 4]
    group.passed_on, group.running = signal.SIGTERM, {object(): 0}
    group.cause = Failure(code="N022", rank=0, at=0.0, what="x")
    group._report_killed()
    assert capsys.readouterr().err == ""
    group.cause = None
    group._report_killed()
    assert "rank 8 did not stop within 30 s of SIGTERM" in capsys.readouterr().err  # of all hosts, not of this one


def test_a_verdict_reaches_the_launcher_of_its_rank(
    played: tuple[Agent, socket.socket, Channel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, template, coordinator = played
    template.setblocking(False)
    agent._obey({**START, "generation": 2})
    assert json.loads(template.recv(MOST))["do"] == "start"
    say(template, agent, say="stall", generation=2, now=[])
    assert coordinator.read() == [{"say": "stall", "generation": 2, "now": []}]
    assert agent.runner is not None
    assert not agent.runner.has_reported
    verdicts = [Verdict(kind="never_entered", rank=9, waited=seconds) for seconds in (3.0, 3.4)]
    agent._obey({"do": "judge", "generation": 1, "verdict": asdict(verdicts[0])})  # of another generation
    with pytest.raises(BlockingIOError):
        template.recv(MOST)
    ours, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    orders.setblocking(False)
    for each in verdicts:
        agent._obey({"do": "judge", "generation": 2, "verdict": asdict(each)})
        ours.send(template.recv(MOST))
    group = host_group(tmp_path, orders=orders, world_size=10)
    group._begin_generation(2)
    heard: list[Any] = []
    monkeypatch.setattr(Watcher, "look", lambda watcher, pids: heard.append(watcher.accused))
    group._fence_hung()
    assert heard == verdicts[1:]
    ours.close()
    group._fence_hung()
    orders.close()


def test_a_long_report_is_shortened_to_one_packet() -> None:
    problems = [Problem("N022", f"{number} failed: " + "ü\n" * 10_000, "a fix") for number in range(50)]
    report = {"say": "rejected", "error": plain_error(RunFailed(*problems))}
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        near.send(encoded(report))
        found = json.loads(far.recv(2**20))
    assert len(encoded(report)) <= MOST_REPORT
    assert str(error_from(found["error"]).problems[0].what).startswith("0 failed: ü")
    assert "left" not in json.loads(encoded({**report, "left": "x"}))
    assert encoded({"say": "ended", "value": "x"}) == b'{"say": "ended", "value": "x"}'
