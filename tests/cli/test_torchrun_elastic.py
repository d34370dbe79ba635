"""`torchrun --nnodes 1:2`: a node is lost and comes back, and the ranks are as many as there are nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.host import Host
from tests.cli.test_launchers import TORCHRUN, free_port
from tests.cli.test_lost_host import SLOW, WORDS
from tests.cli.test_resume import committed, saves
from tests.cli.test_train import losses, records
from tests.warm import warm_python

ENV = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "PYTHON_EXEC": warm_python(),  # by which torchrun starts workers
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # without it torchrun itself hangs when a node joins (torch 2.13)
}
QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


def tree(pid: int) -> list[int]:
    """A process and all that it has started, also in sessions of their own."""
    found = [pid]
    for each in found:
        with contextlib.suppress(FileNotFoundError):
            found += [int(word) for word in Path(f"/proc/{each}/task/{each}/children").read_text().split()]
    return found


def kill(nodes: list[subprocess.Popen[bytes]]) -> None:
    """As machines do that lose their power."""
    for pid in [pid for node in nodes if node.poll() is None for pid in tree(node.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for node in nodes:
        node.wait()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.mark.wide
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_node_that_is_lost_and_comes_back(host: Host, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SLOW.replace("0.05", "0.5"))
    port = free_port()
    several = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "a",
        "--rdzv-conf",
        QUICK,
    ]
    several += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--max-restarts", "3"]
    words = [*TORCHRUN, *several, "-m", "shoal", *WORDS[:-1], "--plan", "zero=3 fp64", "--run.dir", "run"]
    nodes: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with (tmp_path / f"node-{len(nodes)}").open("wb") as said:
            nodes.append(subprocess.Popen(words, cwd=tmp_path, env={**os.environ, **ENV}, stderr=said, stdout=said))
        return nodes[-1]

    def until(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 150
        while not holds():
            said = [(tmp_path / f"node-{number}").read_text()[-3000:] for number in range(len(nodes))]
            assert time.monotonic() < deadline, said
            assert nodes[0].poll() is None, said
            time.sleep(0.05)

    def count(text: str) -> int:
        """In the output of all nodes: torchrun may give rank 0 to any of them."""
        return sum((tmp_path / f"node-{number}").read_text().count(text) for number in range(len(nodes)))

    try:
        first = start()
        until(lambda: listens(port))  # else the node that is lost may have the rendezvous
        lost = start()
        until(lambda: count("2 data ranks x") == 1)  # the first node may have begun alone
        known = committed(saves(tmp_path))
        until(lambda: committed(saves(tmp_path)) > known + 3)
        kill([lost])
        until(lambda: count("saved by 2 ranks") == 1)
        known = committed(saves(tmp_path))
        until(lambda: committed(saves(tmp_path)) > known + 3)
        back = start()
        until(lambda: count("2 data ranks x") == 2)
        (tmp_path / "fast").touch()
        assert first.wait(90) == 0, (tmp_path / "node-0").read_text()[-3000:]
        assert back.wait(30) == 0
    finally:
        kill(nodes)
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 151))
    plain = host.run(*WORDS, "--run.dir", "plain", "--nproc", "1", cwd=tmp_path)
    assert plain.code == 0, plain.said
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-12)
