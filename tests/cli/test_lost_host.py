"""Two hosts with a network between them (namespaces of the kernel), which is cut and mended under a run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cli.host import Host, until
from tests.cli.test_hosts import hosts, ip
from tests.cli.test_resume import committed, saves
from tests.cli.test_train import MADE_UP, losses, records

__all__ = ["hosts"]  # a fixture

SLOW = """
import os, time
from torch import nn

class Bigram(nn.Module):
    num_outputs = 256

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        if not os.path.exists("fast"):
            time.sleep(0.05)
        return self.head(self.embedding(tokens))
"""
WORDS = [
    *["train", "--model.name", "own.py:Bigram", *MADE_UP, "--data.seq_len", "16", "--data.global_batch", "4"],
    *["--data.validation", "0", "--data.workers", "0", "--plan", "fp64", "--device", "cpu", "--launch.threads", "1"],
    *["--run.duration", "150step", "--checkpoint.every", "1step", "--json"],
]
PORT = "29677"


def test_a_lost_host_is_left_out_and_taken_in_again(host: Host, hosts: list[tuple[str, str]], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SLOW)
    (first, here), (second, there) = hosts
    env = {"SHOAL_KEY": "a key for a test of two hosts"}
    meeting = ["--hosts", f"{here}:1,{there}:1", "--min-hosts", "1", "--ssh", "none", "--listen", f"{here}:{PORT}"]
    started = host.start(*WORDS, "--run.dir", "run", *meeting, cwd=tmp_path, env=env, network=first)
    agents = [
        host.start("agent", "--join", f"{here}:{PORT}", "--name", name, cwd=tmp_path, env=env, network=network)
        for network, name in hosts
    ]
    until(lambda: committed(saves(tmp_path)) >= 5, started)
    ip("-n", second, "link", "set", "cable1", "down")
    began = time.monotonic()
    until(lambda: f"host {there} (rank 1) is lost" in started.said, started)
    noticed = time.monotonic() - began
    known = committed(saves(tmp_path))
    until(lambda: committed(saves(tmp_path)) > known + 1, started)
    resumed = time.monotonic() - began
    ip("-n", second, "link", "set", "cable1", "up")
    until(lambda: f"host {there} is back" in started.said, started)
    until(lambda: "continuing on 2 of 2 hosts: dp_replicate=2" in started.said, started)
    (tmp_path / "fast").touch()
    assert started.wait() == 0, started.said
    assert [agent.wait() for agent in agents] == [0, 0]
    assert noticed < 15, started.said  # 3 to 5 s on an idle machine; the run's own timeout is 600 s
    assert resumed < 30, started.said
    assert "continuing on 1 of 2 hosts: zero=0" in started.said
    assert started.json["restarts"] == 2
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, 151))
    plain = host.run(*WORDS, "--run.dir", "plain", "--nproc", "1", cwd=tmp_path)
    assert plain.code == 0, plain.said
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-12)


@pytest.mark.wide
def test_a_network_that_is_cut_between_ranks_alone_is_named(
    host: Host, hosts: list[tuple[str, str]], tmp_path: Path
) -> None:
    """Heartbeats arrive, and packets of one rank do not. It may be a slow link, so the run is not ended at once."""
    (tmp_path / "own.py").write_text(SLOW)
    (first, here), (second, there) = hosts
    env = {"SHOAL_KEY": "a key for a test of a cut network"}
    meeting = ["--hosts", f"{here}:1,{there}:1", "--ssh", "none", "--listen", f"{here}:{PORT}"]
    words = [*WORDS, "--run.dir", "run", "--launch.timeout", "60"]
    started = host.start(*words, *meeting, cwd=tmp_path, env=env, network=first)
    for network, name in hosts:
        host.start("agent", "--join", f"{here}:{PORT}", "--name", name, cwd=tmp_path, env=env, network=network)
    until(lambda: committed(saves(tmp_path)) >= 5, started)
    (low, high) = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    to_ranks = ["ipproto", "tcp", "dport", f"{max(int(low), int(PORT) + 2)}-{high}"]
    ip("-n", second, "rule", "add", "priority", "1", "to", here, *to_ranks, "blackhole")
    began = time.monotonic()
    until(lambda: "and all others have entered " in started.said, started, 30)
    assert time.monotonic() - began < 10
    assert "which has not ended for 3." in started.said
    assert "is lost" not in started.said
    host.kill_what_runs()
