"""Two hosts far apart, with long round trips and lost packets: DiLoCo trains there about as fast as on one machine."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.cli.host import Host
from tests.cli.test_resume import hexed
from tests.cli.test_train import MADE_UP, losses, records
from tests.far_link import far_hosts

MODEL = """
import time
import torch
from torch import nn

SECONDS = {seconds}

class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(SECONDS)
        return gradient

class Bigram(nn.Module):
    num_outputs = 256

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, tokens):
        time.sleep(SECONDS / 2)
        return self.head(SlowBackward.apply(self.embedding(tokens)))
"""
STEPS = 12
SETTINGS = f"""
    --data.seq_len 16 --data.global_batch 4 --data.validation 0 --data.workers 0 --comm.outer_delay 2
    --run.on_nan ignore --device cpu --launch.threads 1 --run.duration {STEPS}step --json
"""
WORDS = ["train", "--model.name", "own.py:Bigram", *MADE_UP, "--plan", "fp64 dp_replicate=2 sync=diloco:4"]
WORDS += SETTINGS.split()
PORT = "29683"


def median_step(run: Path) -> float:
    return statistics.median(record["step_seconds"] for record in records(run)[STEPS // 3 :])


@pytest.mark.wide
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("round_trip", "loss"), [(0.05, 0.01), (0.2, 0.01), (0.5, 0.01)])
def test_a_long_round_trip_and_lost_packets(host: Host, tmp_path: Path, round_trip: float, loss: float) -> None:
    (tmp_path / "own.py").write_text(MODEL.format(seconds=max(0.6, 2 * round_trip + 0.3)))
    env = {"SHOAL_KEY": "a key for a test of far hosts"}
    near = host.run(*WORDS, "--nproc", "2", "--run.dir", "near", cwd=tmp_path)
    assert near.code == 0, near.said
    with far_hosts(round_trip=round_trip, loss=loss, seed=1) as link:
        (first, here), (_, there) = link.hosts
        meeting = ["--hosts", f"{here}:1,{there}:1", "--ssh", "none", "--listen", f"{here}:{PORT}"]
        far = host.start(*WORDS, *meeting, "--run.dir", "far", cwd=tmp_path, env=env, network=first)
        for network, name in link.hosts:
            join = ["--join", f"{here}:{PORT}", "--name", name]
            host.start("agent", *join, cwd=tmp_path, env=env, network=network)
        assert far.wait(240) == 0, far.said
    assert far.json["restarts"] == 0, far.said
    assert hexed(losses(tmp_path / "far")) == hexed(losses(tmp_path / "near"))
    assert link.counts["lost"] > 0
    print(json.dumps({"near": median_step(tmp_path / "near"), "far": median_step(tmp_path / "far"), **link.counts}))
    assert median_step(tmp_path / "far") < 1.1 * median_step(tmp_path / "near")


@pytest.mark.alone
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("round_trip", "is_slow"), [(0.04, True), pytest.param(0.0, False, marks=pytest.mark.wide)])
def test_a_slow_link_explains_itself(host: Host, tmp_path: Path, round_trip: float, is_slow: bool) -> None:
    (tmp_path / "own.py").write_text(MODEL.format(seconds=0.01))
    words = ["train", "--model.name", "own.py:Bigram", *MADE_UP, "--plan", "zero=3", *SETTINGS.split()]
    words[words.index(f"{STEPS}step")] = "21step"
    del words[words.index("--comm.outer_delay") : words.index("--run.on_nan")]
    env = {"SHOAL_KEY": "a key for a test of far hosts"}
    with far_hosts(round_trip=round_trip) as link:
        (first, here), (_, there) = link.hosts
        meeting = ["--hosts", f"{here}:1,{there}:1", "--ssh", "none", "--listen", f"{here}:{PORT}"]
        far = host.start(*words, *meeting, cwd=tmp_path, env=env, network=first)
        for network, name in link.hosts:
            join = ["--join", f"{here}:{PORT}", "--name", name]
            host.start("agent", *join, cwd=tmp_path, env=env, network=network)
        assert far.wait(100) == 0, far.said
    assert ("for messages of dp_shard, on every rank: the link is slow" in far.said) is is_slow, far.said
    assert ("[T101]" in far.said) is is_slow
