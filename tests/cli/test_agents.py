"""`shoal train --hosts`: one agent a host. Here the hosts are addresses of the loopback, all on this machine."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.host import Host, Started, in_session, until, wait_until
from tests.cli.test_launchers import free_port
from tests.cli.test_resume import WORDS, committed, hexed, saves
from tests.cli.test_train import MADE_UP, losses, records

TWO = [*WORDS, "--run.dir", "run", "--checkpoint.every", "1step", "--hosts", "127.0.0.1:1,127.0.0.2:1"]
SHORT = [*TWO, "--run.duration", "8step"]
LONG = [*TWO, "--run.duration", "2000step"]


@pytest.fixture(scope="module")
def undisturbed(host: Host, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = host.run(*WORDS, "--run.dir", "run", "--run.duration", "8step", "--nproc", "2", cwd=folder)
    assert ended.code == 0, ended.said
    return losses(folder / "run")


@pytest.fixture(autouse=True)
def _nothing_is_left(host: Host) -> Iterator[None]:
    yield
    host.kill_what_runs()


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def agents(started: Started) -> list[int]:
    """The agents of the two hosts; the first child of a coordinator is its store."""
    return children(started.pid)[1:]


def workers(agent: int) -> list[int]:
    """The workers of an agent: it has a template, which has a runner, which has workers."""
    return [worker for template in children(agent) for runner in children(template) for worker in children(runner)]


@contextlib.contextmanager
def strangers(*ports: int) -> Iterator[None]:
    """Processes without the key, at all ports of a coordinator: some say nothing, some send pickles or garbage."""
    sent = [b"", b"x" * 64, pickle.dumps({"do": "leave"}), b"GET / HTTP/1.1\r\n\r\n", bytes(200), os.urandom(999)]
    is_over, open_ = threading.Event(), []

    def disturb() -> None:
        for number in itertools.count():
            if is_over.wait(0.02):
                return
            with contextlib.suppress(OSError):
                open_.append(socket.create_connection(("127.0.0.1", ports[number % len(ports)]), timeout=1))
                open_[-1].send(sent[number % len(sent)])
            while len(open_) > 100:
                open_.pop(0).close()

    thread = threading.Thread(target=disturb)
    thread.start()
    yield
    is_over.set()
    thread.join()
    for each in open_:
        each.close()
    assert len(open_) > 20


def test_two_hosts_compute_what_one_does_also_after_a_killed_rank_and_among_strangers(
    host: Host, undisturbed: list[float], tmp_path: Path
) -> None:
    port = free_port()
    with strangers(port, port + 1):
        words = [*SHORT, "--listen", f"127.0.0.1:{port}"]
        ended = host.run(*words, cwd=tmp_path, env={"SHOAL_FAULTS": "kill_at=rank:1,step:5"})
    assert ended.code == 0, ended.said
    assert "rejected a connection from 127.0.0.1: it does not hold the key of this run" in ended.said
    assert hexed(losses(tmp_path / "run")) == hexed(undisturbed)
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 9))
    assert ended.json["restarts"] == 1
    killed = "rank 1 of 2 (host 127.0.0.2) was killed by signal 9 (SIGKILL)"
    assert killed in ended.said
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events if event["event"] != "saved"]
    (failed,) = (event for event in events if event["event"] == "failed")
    assert kinds == ["started", "failed", "resumed", "ended"]
    assert failed["code"] == "N024"
    assert failed["reason"].startswith(killed)


THREADED = """
import torch

class Model(torch.nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(257, hidden), torch.nn.Linear(hidden, 257)

    def forward(self, tokens):
        torch.ones(2**20).exp_()
        return self.head(self.embedding(tokens))

def build(hidden):
    torch.set_num_threads(THREADS)
    torch.randn(2**20).exp_()  # starts a pool of threads, if there is more than one
    return Model(hidden)
"""


@pytest.mark.parametrize("threads", ["2", "torch.get_num_threads()"])
def test_ranks_compute_where_a_model_has_used_threads_before_they_were_started(
    threads: str, host: Host, tmp_path: Path
) -> None:
    (tmp_path / "model.py").write_text(THREADED.replace("THREADS", threads))
    own = ["train", "--model.name", "model.py:build", "--model.hidden", "8", *MADE_UP, "--data.vocabulary", "256"]
    words = [*own, "--data.seq_len", "16", "--data.global_batch", "4", "--data.workers", "0", "--device", "cpu"]
    started = host.start(
        *words, "--launch.threads", "2", "--run.duration", "3step", "--run.dir", "run", "--json",
        "--hosts", "127.0.0.1:1,127.0.0.2:1", cwd=tmp_path,
    )  # fmt: skip
    assert started.wait(60) == 0, started.said
    assert started.json["steps"] == 3


def test_a_stopped_run_saves_and_a_killed_one_leaves_nothing(host: Host, tmp_path: Path) -> None:
    started = host.start(*LONG, cwd=tmp_path)
    until(lambda: committed(saves(tmp_path)) >= 3, started)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 130, started.said
    done = started.json["steps"]
    assert committed(saves(tmp_path)) == done == started.json["saved_step"]

    started = host.start(*LONG, cwd=tmp_path)
    until(lambda: committed(saves(tmp_path)) >= done + 3, started)
    first, second = agents(started)
    os.kill(second, signal.SIGKILL)  # the agent of a host: its workers end, and another one is started
    until(lambda: "host 127.0.0.2 (rank 1) is lost" in started.said, started)
    known = committed(saves(tmp_path))
    until(lambda: committed(saves(tmp_path)) > known + 1, started)
    assert [pid for pid in in_session(started.pid) if pid == second] == []
    assert len(workers(first)) == 1
    os.kill(started.pid, signal.SIGKILL)  # the coordinator
    began = time.monotonic()
    wait_until(lambda: in_session(started.pid) == [], 5)
    assert time.monotonic() - began < 3


def test_a_signal_to_coordinator_and_agent_is_one_request(host: Host, tmp_path: Path) -> None:
    """As a scheduler sends it to all that it has started. The second one had killed the workers before their save."""
    started = host.start(*LONG, cwd=tmp_path, env={"SHOAL_FAULTS": "sleep_at=rank:0,step:6,seconds:1.5"})
    until(lambda: committed(saves(tmp_path)) == 5, started)
    _, second = agents(started)
    for pid in (started.pid, second):
        os.kill(pid, signal.SIGTERM)
    assert started.wait() == 130, started.said
    assert committed(saves(tmp_path)) == started.json["steps"] == started.json["saved_step"]


def test_a_stopped_worker_is_ended_before_the_others_continue(host: Host, tmp_path: Path) -> None:
    """It had stayed while the next generation trained: a process that a signal has stopped notices nothing."""
    started = host.start(*LONG, cwd=tmp_path)
    until(lambda: committed(saves(tmp_path)) >= 3, started)
    (first,), (second,) = (workers(agent) for agent in agents(started))
    os.kill(second, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    until(lambda: "restarting all workers" in started.said, started)
    assert not Path(f"/proc/{second}").exists()
    started.kill_all()


def test_a_host_that_is_lost_while_others_are_waited_for_is_reported(host: Host, tmp_path: Path) -> None:
    port, env = free_port(), {"SHOAL_KEY": "a key for a test of a lost host"}
    started = host.start(*LONG, "--ssh", "none", "--listen", f"127.0.0.1:{port}", cwd=tmp_path, env=env)
    until(lambda: "waiting for 127.0.0.1, 127.0.0.2" in started.said, started)
    join = ["agent", "--join", f"127.0.0.1:{port}", "--name", "127.0.0.2"]
    agent = host.start(*join, cwd=tmp_path, env=env)
    again = host.start(*join, cwd=tmp_path, env=env)  # its place is taken: so one of them has joined before
    until(lambda: "host 127.0.0.2 is lost: another agent of it has joined from 127.0.0.1" in started.said, started)
    for each in (agent, again):
        each.kill_all()
    until(lambda: started.said.count("host 127.0.0.2 is lost: ") == 2, started)
    until(lambda: started.said.count("waiting for 127.0.0.1, 127.0.0.2") == 2, started)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("stop_at", "was stopped by a signal (SIGSTOP) for 2."),
        ("hold_gil_at", "holds the GIL, so that no other Python thread of it runs; rank 0 has waited 5."),
        ("sleep_at", "never entered all_reduce #27 of world (float64[4]); rank 0 has waited 5."),
    ],
)
def test_a_rank_that_hangs_alone_on_its_host_is_ended(
    host: Host, undisturbed: list[float], tmp_path: Path, fault: str, text: str
) -> None:
    """No other rank of its host waits for it. A drill found that it was ended after ten minutes."""
    ended = host.run(*SHORT, cwd=tmp_path, env={"SHOAL_FAULTS": f"{fault}=rank:1,step:5"})
    assert (ended.code, ended.json["restarts"]) == (0, 1), ended.said
    assert f"rank 1 of 2 (host 127.0.0.2) {text}" in ended.said
    assert hexed(losses(tmp_path / "run")) == hexed(undisturbed)


WITHOUT_DATA = """
import time, torch
from shoal.data.sources.synthetic import SyntheticTokens

read = SyntheticTokens.batch
taken = []

def hang(self, ids):
    taken.append(ids)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == LATE and len(taken) > 8:
        time.sleep(100)
    return read(self, ids)

class Model(torch.nn.Sequential):
    def forward(self, tokens):
        return super().forward(tokens)

def build(hidden):
    SyntheticTokens.batch = hang
    return Model(torch.nn.Embedding(257, hidden), torch.nn.Linear(hidden, 257))
"""


@pytest.mark.parametrize("per_host", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_a_rank_that_waits_for_data_is_named_while_another_host_waits_for_it(
    host: Host, tmp_path: Path, per_host: int
) -> None:
    late, num_ranks = 2 * per_host - 1, 2 * per_host
    (tmp_path / "model.py").write_text(WITHOUT_DATA.replace("LATE", str(late)))
    own = ["train", "--model.name", "model.py:build", "--model.hidden", "8", *MADE_UP, "--data.vocabulary", "256"]
    own += ["--data.seq_len", "16", "--data.global_batch", "4", "--data.workers", "0", "--device", "cpu"]
    where = f"127.0.0.1:{per_host},127.0.0.2:{per_host}"
    words = [*own, "--launch.threads", "1", "--run.duration", "100step", "--run.dir", "run", "--hosts", where]
    started = host.start(*words, cwd=tmp_path)
    until(lambda: "[N030]" in started.said, started, 30)
    others = "rank 0 has" if per_host == 1 else "ranks 0, 1, 2 have"
    assert f"[127.0.0.2] shoal: rank {late} of {num_ranks} never entered all_reduce #" in started.said
    assert f"; {others} waited 3." in started.said
    assert " (phase: data) [N030]" in started.said
    until(lambda: "fix: make the same collective calls" in started.said, started, 5)
    assert f"[127.0.0.2]   stack of rank {late}:\n[127.0.0.2]     take (" in started.said  # of the next batch


@pytest.mark.parametrize(
    ("fault", "calls"),
    [
        ("other_op_at", ("broadcast of float32[1000]", "all_reduce of float32[1000]")),
        ("other_shape_at", ("all_reduce of float32[700]", "all_reduce of float32[1000]")),
    ],
)
def test_different_calls_on_two_hosts_are_named(host: Host, tmp_path: Path, fault: str, calls: tuple[str, str]) -> None:
    ended = host.run(*SHORT, cwd=tmp_path, env={"SHOAL_FAULTS": f"{fault}=rank:1,step:5"})
    assert ended.code == 3, ended.said
    called = f"called {calls[0]} as #11 of dp_replicate; rank 0 called {calls[1]} [N033]"
    assert f"rank 1 of 2 (host 127.0.0.2) {called}\n  stack of rank 1:" in ended.said
    assert "_mismatch (" in ended.said


@pytest.mark.wide
def test_hosts_that_are_back_wait_until_a_plan_fits(host: Host, tmp_path: Path) -> None:
    """Two of four hosts are lost. Three ranks do not divide a batch of 8, which had ended the run when one was back."""
    port, env = free_port(), {"SHOAL_KEY": "a key for a test of four hosts"}
    names = [f"127.0.0.{number}" for number in range(1, 5)]
    meeting = ["--hosts", ",".join(f"{name}:1" for name in names), "--min-hosts", "1", "--ssh", "none"]
    words = [*LONG[: LONG.index("--hosts")], *meeting, "--data.global_batch", "8", "--run.duration", "2000step"]
    started = host.start(*words, "--listen", f"127.0.0.1:{port}", cwd=tmp_path, env=env)

    def agent(name: str) -> Started:
        return host.start("agent", "--join", f"127.0.0.1:{port}", "--name", name, cwd=tmp_path, env=env)

    joined = {name: agent(name) for name in names}
    until(lambda: committed(saves(tmp_path)) >= 3, started)
    for name in names[2:]:
        joined[name].kill_all()
    until(lambda: "continuing on 2 of 4 hosts" in started.said, started)
    known = committed(saves(tmp_path))
    until(lambda: committed(saves(tmp_path)) > known + 1, started)
    agent(names[2])
    until(lambda: f"host {names[2]} is back, and waits for others: " in started.said, started)
    known = committed(saves(tmp_path))
    until(lambda: committed(saves(tmp_path)) > known + 1, started)
    agent(names[3])
    until(lambda: "hosts 127.0.0.3, 127.0.0.4 are back: saving, to continue on 4 hosts" in started.said, started)
    until(lambda: "continuing on 4 of 4 hosts" in started.said, started)
    known = committed(saves(tmp_path))
    until(lambda: committed(saves(tmp_path)) > known + 1, started)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 130, started.said
