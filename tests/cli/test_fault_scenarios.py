"""Faults of docs/fault-scenarios.md that no other test has: several at once, no files, other ports, cut networks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.chaos.machine.network import Network
from shoal.chaos.machine.network import hosts as namespaces
from tests.cli.host import Host, Started, until
from tests.cli.test_agents import LONG, TWO
from tests.cli.test_endings import own
from tests.cli.test_launchers import free_port
from tests.cli.test_resume import WORDS, committed, hexed, saves
from tests.cli.test_train import MADE_UP, losses, records


@pytest.fixture(autouse=True)
def _nothing_is_left(host: Host) -> Iterator[None]:
    yield
    host.kill_what_runs()


# ---- several faults -------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_a_replica_at_once_and_then_all_ranks_but_one(host: Host, tmp_path: Path) -> None:
    """Ranks 2 and 3 are a replica. The next generation loses three ranks in its first step, before it has saved."""
    words = [*WORDS, "--nproc", "4", "--plan", "fp64 dp_replicate=2 dp_shard=2", "--run.duration", "6step"]
    words += ["--checkpoint.every", "1step"]
    faults = [f"kill_at=rank:{rank},step:4" for rank in (2, 3)]
    faults += [f"kill_at=rank:{rank},step:{step},generation:1" for rank in (0, 1, 2) for step in (3, 4)]
    plain = host.start(*words, "--run.dir", "plain", cwd=tmp_path)
    ended = host.run(*words, "--run.dir", "run", cwd=tmp_path, env={"SHOAL_FAULTS": " ".join(faults)})
    assert (ended.code, plain.wait()) == (0, 0), ended.said + plain.said
    assert ended.json["restarts"] == 2
    assert hexed(losses(tmp_path / "run")) == hexed(losses(tmp_path / "plain"))
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 7))


def test_four_replicas_resume_bit_for_bit(host: Host, tmp_path: Path) -> None:
    """DDP cuts its buckets after the first step of a process, and a ring adds more than two ranks in an order that
    depends on the place in a bucket: a resumed run differed in its last bits. `shoal chaos` found it."""
    words = [*WORDS, "--nproc", "4", "--run.duration", "6step", "--checkpoint.every", "1step"]
    plain = host.start(*words, "--run.dir", "plain", cwd=tmp_path)
    ended = host.run(*words, "--run.dir", "run", cwd=tmp_path, env={"SHOAL_FAULTS": "kill_at=rank:1,step:4"})
    assert (ended.code, plain.wait()) == (0, 0), ended.said + plain.said
    assert ended.json["restarts"] == 1
    norms = [[record["grad_norm"].hex() for record in records(tmp_path / name)] for name in ("run", "plain")]
    assert norms[0] == norms[1]
    assert hexed(losses(tmp_path / "run")) == hexed(losses(tmp_path / "plain"))


def test_a_rank_without_file_descriptors_is_restarted(host: Host, tmp_path: Path) -> None:
    words = own(tmp_path, "no_files")
    with (tmp_path / "own.py").open("a") as file:
        file.write(
            "\ndef no_files(): return Bigram(limit, 4)\n"
            "def limit():\n"
            "    import resource\n"
            "    used = max(map(int, os.listdir('/proc/self/fd')))\n"
            "    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))\n"
        )
    ended = host.run(*words, "--nproc", "2", cwd=tmp_path)
    assert (ended.code, ended.json["restarts"], ended.json["steps"]) == (0, 1, 6), ended.said
    assert "Too many open files" in ended.said
    assert "rank 1 of 2" in ended.said


DROPPING = """
from torch import nn

class Dropping(nn.Module):
    num_outputs = 256

    def __init__(self):
        super().__init__()
        self.embedding, self.dropout, self.head = nn.Embedding(256, 8), nn.Dropout(0.5), nn.Linear(8, 256)

    def forward(self, tokens):
        return self.head(self.dropout(self.embedding(tokens)))
"""


@pytest.mark.wide
def test_dropout_is_the_same_on_any_number_of_ranks(host: Host, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(DROPPING)
    words = [
        *["train", "--model.name", "own.py:Dropping", *MADE_UP, "--data.seq_len", "16", "--data.global_batch", "6"]
    ]
    words += ["--data.workers", "0", "--device", "cpu", "--launch.threads", "1", "--run.duration", "5step", "--json"]
    words += ["--optim.lr", "0.1", "--plan", "fp64 mb=1"]
    for nproc in ("1", "2", "3"):
        ended = host.run(*words, "--nproc", nproc, "--run.dir", f"on-{nproc}", cwd=tmp_path)
        assert ended.code == 0, ended.said
    assert losses(tmp_path / "on-1") == pytest.approx(losses(tmp_path / "on-2"), rel=1e-12)
    assert losses(tmp_path / "on-1") == pytest.approx(losses(tmp_path / "on-3"), rel=1e-12)


# ---- hosts ----------------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_a_coordinator_at_another_address_and_one_at_the_same_port(host: Host, tmp_path: Path) -> None:
    """The coordinator is killed; the command is given again, at once at its port and then at another address."""
    port, resumed = free_port(), []
    for address in (f"127.0.0.1:{port}", f"127.0.0.1:{port}", f"127.0.0.3:{free_port()}"):
        known = committed(saves(tmp_path))
        started = host.start(*LONG, "--listen", address, cwd=tmp_path)
        until(lambda known=known: committed(saves(tmp_path)) >= known + 2, started)  # type: ignore[misc]
        os.kill(started.pid, signal.SIGKILL)
        started.wait()
        resumed.append(committed(saves(tmp_path)))
    assert resumed == sorted(set(resumed))
    done = resumed[-1] + 1
    ended = host.run(*TWO, "--run.duration", f"{done}step", "--listen", f"127.0.0.1:{port}", cwd=tmp_path)
    assert (ended.code, ended.json["resumed_from"] >= resumed[-1] - 1) == (0, True), ended.said
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, done + 1))


PORT = "29678"


@pytest.fixture
def three_hosts() -> Iterator[Network]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    with namespaces(3, f"shoal-test-{os.getpid()}") as network:
        yield network


def start_all(host: Host, network: Network, folder: Path, on: list[int]) -> Started:
    """A coordinator on the first host, and agents on some."""
    names = ",".join(f"{network.addresses[each]}:1" for each in on)
    meeting = ["--hosts", names, "--ssh", "none", "--listen", f"{network.addresses[0]}:{PORT}"]
    words = [*WORDS, "--run.dir", "run", "--checkpoint.every", "1step", "--run.duration", "5000step", *meeting]
    env = {"SHOAL_KEY": "a key for a test of three hosts"}
    started = host.start(*words, cwd=folder, env=env, network=network.names[0])
    for each in on:
        join = ["--join", f"{network.addresses[0]}:{PORT}", "--name", network.addresses[each]]
        host.start("agent", *join, cwd=folder, env=env, network=network.names[each])
    until(lambda: committed(saves(folder)) >= 3, started)
    return started


@pytest.mark.wide
def test_a_short_cut_of_the_coordinator_alone_stops_nothing(host: Host, three_hosts: Network, tmp_path: Path) -> None:
    started = start_all(host, three_hosts, tmp_path, on=[1, 2])
    three_hosts.cut(0)
    known = committed(saves(tmp_path))
    until(lambda: committed(saves(tmp_path)) >= known + 3, started, 2)  # the ranks reach each other
    time.sleep(0.5)
    three_hosts.heal(0)
    until(lambda: committed(saves(tmp_path)) >= known + 30, started)
    time.sleep(3)
    assert "restarting" not in started.said
    assert "is lost" not in started.said


@pytest.mark.wide
def test_where_no_host_reaches_another_nothing_is_committed_until_they_do(
    host: Host, three_hosts: Network, tmp_path: Path
) -> None:
    started = start_all(host, three_hosts, tmp_path, on=[0, 1, 2])
    for each in range(3):
        three_hosts.cut(each)
    until(lambda: "is lost" in started.said, started, 15)
    known = committed(saves(tmp_path))
    time.sleep(4)
    assert committed(saves(tmp_path)) == known
    for each in range(3):
        three_hosts.heal(each)
    until(lambda: committed(saves(tmp_path)) > known + 3, started, 60)
    made = [record["step"] for record in records(tmp_path / "run")]
    assert made == list(range(1, len(made) + 1))


@pytest.mark.wide
def test_a_link_that_flaps_causes_no_storm_of_restarts(host: Host, three_hosts: Network, tmp_path: Path) -> None:
    started = start_all(host, three_hosts, tmp_path, on=[1, 2])
    known = committed(saves(tmp_path))
    for _ in range(5):
        three_hosts.cut(2)
        time.sleep(2)
        three_hosts.heal(2)
        time.sleep(2)
    until(lambda: committed(saves(tmp_path)) > known + 10, started, 60)
    assert started.said.count("restarting all workers") <= 5
