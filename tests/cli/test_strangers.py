"""A stranger on this host, of another user, that knows the address of rank 0: it gets no rank and runs no code.

The stranger has torch, and writes pickles that would make a file; but it has not the key. Before rank 1 comes it takes
rank 1's place, overwrites every value in the store, and repeats what real ranks of an earlier run wrote there.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_launchers import free_port

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to start a process of another user")

RANK = """
import os, sys, time
from shoal.comm.rendezvous.environment import read_environment
from shoal.comm.world import World
from shoal.errors import ShoalError

place = read_environment(os.environ)
print("start", flush=True)
try:
    with World.start(place, device="cpu", timeout=25) as world:
        print("gathered", place.generation, world.all_gather_object(f"rank {world.rank}"), flush=True)
        if "fail" in sys.argv and place.generation == 0:
            os._exit(1)
except ShoalError as error:
    print("error", error, flush=True)
    sys.exit(error.exit_code)
"""

STRANGER = """
import os, pickle, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

port, marker, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]


class Evil:
    def __reduce__(self):
        return os.system, (f"touch {marker}",)


def join(store):
    dist.init_process_group("gloo", rank=1, world_size=2, store=store, timeout=timedelta(seconds=2))
    dist.all_reduce(torch.zeros(1, dtype=torch.float64))
    dist.all_gather_object([None, None], Evil())


store = dist.HashStore()  # torch loads more when a group is made, from where another user may not read
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
dist.all_gather_object([None], 1)
dist.destroy_process_group()
os.setgroups([])
os.setgid(12345)
os.setuid(12345)
print("ready", flush=True)
sys.stdin.readline()
deadline = time.monotonic() + 10
while True:
    try:
        store = dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=2))  # counted as a worker
        break
    except dist.DistNetworkError:
        assert time.monotonic() < deadline
if how == "join":
    try:
        join(dist.PrefixStore("generation 0 world 0", store))  # where ranks met before there was a key
    except Exception as error:
        print("refused", type(error).__name__, flush=True)
runs = ["2 ranks, generation %d, world 0" % generation for generation in range(2)]
seen = {}


def disturb():
    for name in store.list_keys():
        if store.check([name]):
            value = store.get(name)
            seen.setdefault(name, value)
            if how != "replay":
                store.set(name, pickle.dumps(Evil()))
    for run in runs:
        for what in ("hello 1", "answer 1", "proof 1", "challenge"):
            if how == "replay":  # what a rank of the generation before wrote
                for name, value in seen.items():
                    if runs[0] in name and name.endswith(what):
                        store.set(f"{runs[1]}/{what}", value)
            else:
                store.set(f"{run}/{what}", pickle.dumps(Evil()))


until = time.monotonic() + float(sys.argv[4])
try:
    disturb()
    print("disturbed", flush=True)
    while time.monotonic() < until:
        disturb()
        time.sleep(0.001)
except Exception as error:
    print("ended", type(error).__name__, flush=True)
print("disturbed", flush=True)
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes, which end with the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        with process:  # closes its pipes
            process.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory in which both users may make files."""
    path = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    path.chmod(0o777)
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


def start(processes: list[subprocess.Popen[str]], words: list[str], **options: Any) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    processes.append(subprocess.Popen([sys.executable, *words], text=True, **pipes, **options))  # type: ignore[call-overload]
    return processes[-1]


def stranger(processes: list[subprocess.Popen[str]], port: int, marker: Path, how: str, seconds: float) -> Any:
    """Another user's process, which begins when a line is written to it. It has loaded torch before it became one."""
    words = ["-c", STRANGER, str(port), str(marker), how, str(seconds)]
    other = start(processes, words, env={"PATH": "/usr/bin:/bin"}, cwd="/")
    assert line_of(other) == "ready"
    assert "\nUid:\t12345\t12345\t12345\t" in Path(f"/proc/{other.pid}/status").read_text()
    return other


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def rank_of(processes: list[subprocess.Popen[str]], rank: int, port: int, **more: str) -> subprocess.Popen[str]:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in variables.items()}, **more}
    return start(processes, ["-c", RANK], env=env)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on port {port}")


def test_a_stranger_that_comes_before_rank_1(started: list[subprocess.Popen[str]], folder: Path) -> None:
    """It joins as rank 1 and overwrites all that it finds. Then the true rank 1 comes, and the run is as it should."""
    port, marker, home = free_port(), folder / "marker", {"HOME": str(folder / "home")}
    other = stranger(started, port, marker, "join", 0.5)
    first = rank_of(started, 0, port, **home)
    begin(other)
    wait_for_port(port)
    text, _ = other.communicate(timeout=20)
    assert not marker.exists()
    assert "refused" in text
    assert "disturbed" in text
    second = rank_of(started, 1, port, **home)
    for process in (first, second):
        text, _ = process.communicate(timeout=20)
        assert "gathered 0 ['rank 0', 'rank 1']" in text
    assert not marker.exists()
    key = folder / "home" / ".config" / "shoal" / "key"
    assert key.stat().st_mode & 0o777 == 0o600


@pytest.mark.wide
def test_a_stranger_that_persists(started: list[subprocess.Popen[str]], folder: Path) -> None:
    """The ranks either are faster, or end with a message; none of them waits for its time to be out."""
    port, marker = free_port(), folder / "marker"
    other = stranger(started, port, marker, "garbage", 60)
    ranks = [rank_of(started, rank, port, SHOAL_KEY="a key of the two ranks") for rank in range(2)]
    begin(other)
    began = time.monotonic()
    texts = [rank.communicate(timeout=40)[0] for rank in ranks]
    assert time.monotonic() - began < 30
    for text in texts:
        assert "gathered 0 ['rank 0', 'rank 1']" in text or "\nerror " in text, text
    assert not marker.exists()


@pytest.mark.wide
def test_torchrun_and_a_stranger_that_repeats(started: list[subprocess.Popen[str]], folder: Path) -> None:
    """It writes what the ranks of the first generation wrote into the place of the second one, under torchrun's store,
    which listens on all interfaces."""
    port, marker = free_port(), folder / "marker"
    other = stranger(started, port, marker, "replay", 30)
    script = folder / "rank.py"
    script.write_text(RANK)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--master-port"]
    env = {**os.environ, "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    run = start(started, [*torchrun, str(port), str(script), "fail"], env=env)
    wait_for_port(port)
    begin(other)
    text, _ = run.communicate(timeout=60)
    assert "gathered 0 ['rank 0', 'rank 1']" in text, text
    # A stranger that never rests can keep them apart, but then they say so.
    kept_apart = "answers in place of rank 0" in text or "rank 1 was rejected" in text
    assert text.count("gathered 1 ['rank 0', 'rank 1']") == 2 or kept_apart, text
    assert not marker.exists()


def test_another_key_on_one_rank_is_named_by_all(started: list[subprocess.Popen[str]]) -> None:
    port = free_port()
    ranks = [rank_of(started, rank, port, SHOAL_KEY=f"the secret of number {rank}") for rank in range(2)]
    for rank in ranks:
        assert line_of(rank) == "start"
    began = time.monotonic()
    texts = [rank.communicate(timeout=20)[0] for rank in ranks]
    assert time.monotonic() - began < 10
    assert "error rank 1 was rejected: it did not prove that it holds the key of this run" in texts[0]
    assert "error rank 1 and rank 0 do not hold the same key" in texts[1]
    assert all("export SHOAL_KEY=" in text and "the secret" not in text for text in texts)
