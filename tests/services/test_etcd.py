"""No host is a single point of failure: three hosts with an etcd each, of which the one that leads is lost.

Run by `make test-etcd`. The hosts are network namespaces with a switch between them. They share no directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.launch.hosts.etcd.client import Etcd
from shoal.launch.hosts.etcd.leadership import RENEWAL, Leadership, LostLead, Watch
from shoal.launch.hosts.lease import TAKEOVER
from tests.cli.host import enter_network
from tests.cli.test_hosts import ip
from tests.cli.test_lost_host import SLOW
from tests.cli.test_lost_host import WORDS as LOST_HOST
from tests.rejects import rejects

SOURCE = Path(__file__).parents[2] / "src"
NAMES = [f"shoal-test-{os.getpid()}-{letter}" for letter in "abc"]  # another checkout may test, too
SWITCH = f"shoal-test-{os.getpid()}-net"
ADDRESSES = {name: f"10.76.0.{number + 1}" for number, name in enumerate(NAMES)}
URL = f"etcd://{','.join(f'{address}:2379' for address in ADDRESSES.values())}/a-run"
KEY = "a key for a test of etcd"
NUM_STEPS = 120
STARTED: list[subprocess.Popen[bytes]] = []
WORDS = [
    *LOST_HOST[1:],
    "--plan",
    "zero=3 fp64",
    "--run.duration",
    f"{NUM_STEPS}step",
    "--checkpoint.every",
    "10000step",
]

pytestmark = pytest.mark.skipif(
    not os.environ.get("SHOAL_SERVICES"), reason="needs etcd (package etcd-server): make test-etcd"
)


@pytest.fixture
def network() -> Iterator[None]:
    """Three hosts at one switch."""
    if shutil.which("etcd") is None:
        pytest.skip("needs etcd (package etcd-server)")
    try:
        for name in (*NAMES, SWITCH):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", SWITCH, "link", "add", "switch", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "switch", "up")
        for number, (name, address) in enumerate(ADDRESSES.items()):
            cable = f"cable{number}"
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", cable, "netns", SWITCH)
            ip("-n", SWITCH, "link", "set", cable, "master", "switch", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield
    finally:
        for name in (*NAMES, SWITCH):
            kill_all(name)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        for process in STARTED:
            process.kill()
            process.wait()


def kill_all(network: str) -> None:
    """Kill all processes of a host, as a machine does that loses its power."""
    found = subprocess.run(["ip", "netns", "pids", network], check=False, capture_output=True, text=True)
    for pid in found.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def start(network: str, cwd: Path, *words: str) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "SHOAL_KEY": KEY, "CUDA_VISIBLE_DEVICES": ""}
    number = len(list(cwd.iterdir()))
    with (cwd / f"said-{number}").open("w") as said, (cwd / "out").open("w") as out:
        command = ["ip", "netns", "exec", network, *words]
        STARTED.append(subprocess.Popen(command, cwd=cwd, env=environ, stderr=said, stdout=out))
        return STARTED[-1]


@pytest.fixture
def etcd(network: None, tmp_path: Path) -> None:
    """An etcd on each host."""
    cluster = ",".join(f"{name}=http://{address}:2380" for name, address in ADDRESSES.items())
    for name, address in ADDRESSES.items():
        (tmp_path / name).mkdir()
        urls = [f"--{each}=http://{address}:2379" for each in ("listen-client-urls", "advertise-client-urls")]
        urls += [f"--{each}=http://{address}:2380" for each in ("listen-peer-urls", "initial-advertise-peer-urls")]
        words = ["etcd", f"--name={name}", f"--initial-cluster={cluster}", f"--data-dir={tmp_path / name / 'etcd'}"]
        start(name, tmp_path / name, *words, *urls)


def said(host: str, tmp_path: Path) -> str:
    return "".join(path.read_text() for path in sorted((tmp_path / host).glob("said-*")) if path.stat().st_size < 10**6)


def wait_for(text: str, host: str, tmp_path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while text not in said(host, tmp_path):
        assert time.monotonic() < deadline, {each: said(each, tmp_path)[-3000:] for each in NAMES}
        time.sleep(0.05)


def steps(host: str, tmp_path: Path) -> dict[int, float]:
    path = tmp_path / host / "run" / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {record["step"]: record["loss"] for record in records}


def test_another_coordinator_takes_over_when_the_host_of_one_is_lost(etcd: None, tmp_path: Path) -> None:
    first, second, third = NAMES
    train = [sys.executable, "-m", "shoal", "train", *WORDS, "--run.dir", "run", "--checkpoint.memory_every", "1step"]
    train += ["--checkpoint.memory_dir", "memory", "--min-hosts", "1", "--ssh", "none", "--store", URL]
    train += ["--hosts", f"{ADDRESSES[first]}:1,{ADDRESSES[second]}:1"]
    agent = [sys.executable, "-m", "shoal", "agent", "--store", URL, "--name"]
    memories = {name: Path("/dev/shm") / name for name in NAMES}
    try:
        for name, memory in memories.items():
            memory.mkdir(mode=0o700)
            (tmp_path / name / "memory").symlink_to(memory)
            (tmp_path / name / "own.py").write_text(SLOW)
        start(first, tmp_path / first, *train, "--listen", ADDRESSES[first])
        start(first, tmp_path / first, *agent, ADDRESSES[first])
        kept = start(second, tmp_path / second, *agent, ADDRESSES[second])
        wait_for("waiting for 10.76.0.1, 10.76.0.2", first, tmp_path)
        standby = start(third, tmp_path / third, *train, "--listen", ADDRESSES[third])
        wait_for("the coordinator at 10.76.0.1:", third, tmp_path)
        deadline = time.monotonic() + 60
        while max(steps(first, tmp_path), default=0) < 5:
            assert time.monotonic() < deadline, {each: said(each, tmp_path)[-3000:] for each in NAMES}
            time.sleep(0.05)
        ip("-n", first, "link", "set", "eth0", "down")  # the machine is gone: its etcd, coordinator, agent and ranks
        kill_all(first)
        began, known = time.monotonic(), steps(first, tmp_path)
        shutil.rmtree(memories[first])
        wait_for("taking over generation 0 of hosts 10.76.0.1, 10.76.0.2", third, tmp_path)
        taken = time.monotonic() - began
        recorded = re.search(r"step (\d+) was saved", said(third, tmp_path))
        assert recorded is not None  # else a run without its checkpoints would start over at step 0
        assert 0 < int(recorded[1]) <= max(known)
        while not steps(second, tmp_path):
            assert time.monotonic() < began + 60, {each: said(each, tmp_path)[-3000:] for each in NAMES}
            time.sleep(0.05)
        resumed = time.monotonic() - began
        (tmp_path / second / "fast").touch()
        assert standby.wait(90) == 0, said(third, tmp_path)
        assert kept.wait(20) == 0, said(second, tmp_path)
    finally:
        for memory in memories.values():
            shutil.rmtree(memory, ignore_errors=True)
    print(f"taken over after {taken:.1f} s, next step after {resumed:.1f} s")
    summary = json.loads((tmp_path / third / "out").read_text())
    assert summary["steps"] == NUM_STEPS
    made = steps(second, tmp_path)
    assert min(made) in (max(known), max(known) + 1)  # the last step of the lost host may be written and not saved
    assert sorted(made) == list(range(min(made), NUM_STEPS + 1))
    (tmp_path / third / "fast").touch()
    plain = start(third, tmp_path / third, *train[:4], *WORDS, "--run.dir", "run", "--nproc", "1")
    assert plain.wait(90) == 0, said(third, tmp_path)
    expected = steps(third, tmp_path)
    assert {**known, **made} == pytest.approx(expected, rel=1e-12)


def test_a_coordinator_that_was_stopped_comes_back_and_is_rejected(etcd: None, tmp_path: Path) -> None:
    """It sleeps for longer than its lease, as a machine that was suspended. Another one leads the run meanwhile."""
    first, second, third = NAMES
    train = [
        sys.executable,
        "-m",
        "shoal",
        "train",
        *WORDS,
        "--run.dir",
        "run",
        "--checkpoint.dir",
        str(tmp_path / "all"),
    ]
    train += ["--checkpoint.every", "1step", "--ssh", "none", "--store", URL, "--hosts", f"{ADDRESSES[second]}:1"]
    for name in NAMES:
        (tmp_path / name / "own.py").write_text(SLOW)
    stopped = start(first, tmp_path / first, *train, "--listen", ADDRESSES[first])
    wait_for("waiting for 10.76.0.2", first, tmp_path)
    agent = [sys.executable, "-m", "shoal", "agent", "--store", URL, "--name", ADDRESSES[second]]
    kept = start(second, tmp_path / second, *agent)
    standby = start(third, tmp_path / third, *train, "--listen", ADDRESSES[third])
    wait_for("the coordinator at 10.76.0.1:", third, tmp_path)
    deadline = time.monotonic() + 60
    while max(steps(second, tmp_path), default=0) < 5:
        assert time.monotonic() < deadline, {each: said(each, tmp_path)[-3000:] for each in NAMES}
        time.sleep(0.05)
    assert "the coordinator is lost" not in said(second, tmp_path)
    found = subprocess.run(["ip", "netns", "pids", first], check=True, capture_output=True, text=True).stdout.split()
    sleeping = [int(pid) for pid in found if b"shoal" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert stopped.pid in sleeping
    for pid in sleeping:
        os.kill(pid, signal.SIGSTOP)
    wait_for("taking over generation 0 of hosts 10.76.0.2", third, tmp_path)
    assert "the coordinator is lost; the workers here were ended" in said(second, tmp_path)
    known = max(steps(second, tmp_path))
    while max(steps(second, tmp_path)) < known + 5:
        assert time.monotonic() < deadline + 60, {each: said(each, tmp_path)[-3000:] for each in NAMES}
        time.sleep(0.05)
    for pid in sleeping:
        os.kill(pid, signal.SIGCONT)
    wait_for("does not lead run 'a-run' in etcd any more", first, tmp_path)
    (tmp_path / second / "fast").touch()
    assert standby.wait(90) == 0, said(third, tmp_path)
    assert (kept.wait(20), stopped.wait(20)) == (0, 0), said(first, tmp_path)
    assert "the run has ended under another coordinator" in said(first, tmp_path)
    assert said(third, tmp_path).count("restarting all workers") == 0, said(third, tmp_path)
    assert sorted(steps(second, tmp_path)) == list(range(1, NUM_STEPS + 1))


@contextlib.contextmanager
def within(network: str) -> Iterator[None]:
    """Move this process to another network for the duration of the context."""
    before = os.open("/proc/self/ns/net", os.O_RDONLY)
    enter_network(network)
    try:
        yield
    finally:
        ctypes.CDLL(None).setns(before, 0)
        os.close(before)


def test_one_leads_and_one_that_is_cut_off_stops_before_another_one_begins(etcd: None) -> None:
    ip("-n", SWITCH, "address", "add", "10.76.0.9/24", "dev", "switch")
    with within(SWITCH):
        _check_leads()


def test_a_leader_that_was_stopped_writes_nothing_when_it_wakes_up(etcd: None, tmp_path: Path) -> None:
    """It is stopped at any moment: mostly while it writes."""
    ip("-n", SWITCH, "address", "add", "10.76.0.9/24", "dev", "switch")
    with within(SWITCH):
        two = Leadership(_ready(), b"k" * 32)
        script = tmp_path / "writer.py"
        script.write_text(WRITER)
        command = [sys.executable, str(script), URL]
        writer = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(SOURCE)}, stdout=subprocess.PIPE)
        STARTED.append(writer)
        assert writer.stdout is not None
        deadline = time.monotonic() + 20
        while two.state().get("number", 0) < 20:
            assert time.monotonic() < deadline
        writer.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert two.wait_to_lead(("10.76.0.2", 2), lambda text: None, lambda: None)
        assert TAKEOVER - RENEWAL < time.monotonic() - began < TAKEOVER + 2
        two.write({"number": 0, "of": "two"})
        writer.send_signal(signal.SIGCONT)
        until = time.monotonic() + 2
        while time.monotonic() < until:
            two.renew()
            assert two.state() == {"number": 0, "of": "two"}
        printed, _ = writer.communicate(timeout=20)
        assert (writer.returncode, b"N095" in printed) == (0, True)


WRITER = """
import sys, time
from shoal.launch.hosts.etcd.client import Etcd
from shoal.launch.hosts.etcd.leadership import Leadership, LostLead
leads = Leadership(Etcd.at(sys.argv[1]), b"k" * 32)
assert leads.wait_to_lead(("10.76.0.1", 1), lambda text: None, lambda: None)
try:
    for number in range(1, 10**9):
        leads.write({"number": number, "of": "one"})
except LostLead as error:
    print(error.codes)
"""


def _ready() -> Etcd:
    client = Etcd.at(URL)
    deadline = time.monotonic() + 20
    while not _answers(client):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return client


def _check_leads() -> None:
    client = _ready()
    one, two, stranger = (Leadership(Etcd.at(URL), key) for key in (b"k" * 32, b"k" * 32, b"o" * 32))
    noted: list[str] = []
    assert one.wait_to_lead(("10.76.0.1", 1), noted.append, lambda: None)
    leader = two.look(Watch())
    assert leader is not None
    assert (leader["host"], leader["port"]) == ("10.76.0.1", 1)
    with rejects("N094", "was not written with the key"):
        stranger.look(Watch())
    one.write({"generation": 3})
    with pytest.raises(LostLead):
        two.write({"generation": 4})
    late = client.read("/shoal/a-run/state")[0]
    one.write({"generation": 3, "num_saved": 7})
    assert not one._change({"/shoal/a-run/state": b"late"}, {"/shoal/a-run/state": late.revision})
    assert one.state() == {"generation": 3, "num_saved": 7}
    one.etcd.endpoints = [("10.76.0.99", 2379)]  # cut off
    began = time.monotonic()
    with pytest.raises(LostLead):
        _renew_for_ever(one)
    stopped = time.monotonic() - began
    assert two.wait_to_lead(("10.76.0.2", 2), noted.append, lambda: None)
    assert time.monotonic() - began > stopped
    assert noted == ["the coordinator at 10.76.0.1:1 leads; this one waits to take over"]
    assert two.state() == {"generation": 3, "num_saved": 7}
    two.end(exit_code=3)
    assert (two.state()["has_ended"], two.state()["exit_code"]) == (True, 3)
    assert two.look(Watch()) is None


def _renew_for_ever(leadership: Leadership) -> None:
    while True:
        leadership.renew()
        time.sleep(0.1)


def _answers(client: Etcd) -> bool:
    with contextlib.suppress(Exception):
        client.read("any")
        return True
    return False


@pytest.mark.parametrize("url", ["etcd://a:2379", "http://a:2379/x", "etcd://a/x", "etcd:///x", "etcd://a:2379/../x"])
def test_a_store_needs_hosts_and_a_name(url: str) -> None:
    with pytest.raises(ShoalError) as caught:
        Etcd.at(url)
    assert caught.value.codes == ("N093",)
