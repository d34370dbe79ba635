"""`shoal profile` and `run.profile`: a verdict with its evidence, files for a page and for Perfetto, causes put in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.pages.run.find_runs import find_runs
from tests.cli.host import Host

WORDS = [
    *["--data.source", "synthetic", "--data.synthetic_kind", "images", "--data.image_size", "8"],
    *["--data.vocabulary", "8", "--data.global_batch", "8", "--data.synthetic_samples", "64", "--data.workers", "0"],
    *[
        "--model.name",
        "mlp",
        "--model.sizes",
        "[192, 16, 8]",
        "--device",
        "cpu",
        "--launch.threads",
        "1",
        "--checkpoint.every",
        "0step",
    ],
]


def test_a_slow_rank_is_named(host: Host, tmp_path: Path) -> None:
    words = [
        *WORDS,
        "--nproc",
        "2",
        "--steps",
        "2",
        "--json",
        "--trace",
        "here.json",
        "--html",
        "here.html",
        "--run.bucket_mb",
        "0.001",
    ]
    done = host.run("profile", *words, cwd=tmp_path, env={"SHOAL_FAULTS": "sleep_at=rank:1,seconds:0.2"})
    assert done.code == 0, done.said
    found = json.loads(done.out.read_text())
    assert (found["verdict"]["kind"], found["verdict"]["rank"]) == ("straggler", 1)
    assert "more in optimizer" in found["verdict"]["evidence"]  # the fault is between gradients and update
    assert sum(part["fraction"] for part in found["parts"]) == pytest.approx(1, abs=1e-6)
    assert found["operators"][0]["calls"] > 0
    memory, peaks = found["memory"], [rank["peak_bytes"] for rank in found["ranks"]]
    assert memory["measured_peak"] == max(peaks) == peaks[memory["fullest_rank"]]
    assert min(peaks) > memory["counted"]["parameters"] > 0
    assert found["is_calibrated"] is False
    assert found["predicted_step_seconds"] > 0
    written = json.loads((tmp_path / "runs/run-profile/profile.json").read_text())
    assert written["verdict"] == found["verdict"]
    assert len(json.loads((tmp_path / "here.json").read_text())["traceEvents"]) > 20
    page = (tmp_path / "here.html").read_text()
    assert "waiting for rank 1" in page
    assert "Every rank" in page
    assert not (tmp_path / "runs/run").exists()
    assert find_runs(tmp_path)[0].state == "ended"


def test_a_slow_disk_is_named_in_a_run_that_saves(host: Host, tmp_path: Path) -> None:
    words = [*WORDS, "--nproc", "1", "--run.profile", "2step", "--run.duration", "6step", "--checkpoint.every", "1step"]
    done = host.run("train", *words, cwd=tmp_path, env={"SHOAL_FAULTS": "slow_disk_at=rank:0,seconds:0.05"})
    assert done.code == 0, done.said
    found = json.loads((tmp_path / "runs/run/profile.json").read_text())
    assert found["verdict"]["kind"] == "saving"
    assert found["steps"] == 2
    assert "profile: saving checkpoints" in done.said


def test_wrong_numbers_of_steps_are_rejected(host: Host, tmp_path: Path) -> None:
    done = host.run("profile", *WORDS, "--steps", "0", "--run.profile", "3min", cwd=tmp_path)
    assert done.code == 2
    text = " ".join(done.err.read_text().split())
    assert "--steps must be at least 1, got 0" in text
    assert "run.profile must be a number of steps, got the time 3min" in text


EVALUATED = """\
import time
from torch import nn

class Net(nn.Sequential):
    def forward(self, images):
        if not self.training:
            time.sleep(0.4)
        return super().forward(images)

def build():
    return Net(nn.Flatten(), nn.Linear(192, 8))
"""


def test_an_evaluation_is_in_no_step(host: Host, tmp_path: Path) -> None:
    """The steps of a profile are those of the metrics."""
    (tmp_path / "net.py").write_text(EVALUATED)
    words = [*WORDS[: WORDS.index("--model.name")], *WORDS[WORDS.index("--device") :]]
    words += ["--model.name", "net.py:build", "--nproc", "1", "--data.validation", "0.125"]
    words += ["--run.profile", "3step", "--run.duration", "8step", "--run.evaluate_every", "1step"]
    done = host.run("train", *words, cwd=tmp_path)
    assert done.code == 0, done.said
    found = json.loads((tmp_path / "runs/run/profile.json").read_text())
    lines = map(json.loads, (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines())
    seconds = [line["step_seconds"] for line in lines if "step_seconds" in line and 4 <= line["step"] <= 6]
    assert sum(part["seconds"] for part in found["parts"]) == pytest.approx(found["step_seconds"])
    assert 3 * found["step_seconds"] == pytest.approx(sum(seconds), abs=0.3)


SLOW = """\
import time
from torch import nn
from shoal.train.profile.operators import OperatorTrace

OperatorTrace.operators = lambda self: (time.sleep(4), {})[1]

class Net(nn.Sequential):
    def forward(self, images):
        return super().forward(images)

def build():
    return Net(nn.Flatten(), nn.Linear(192, 8))
"""


@pytest.mark.wide
def test_the_time_of_the_profile_itself_is_in_no_step_and_no_hang(host: Host, tmp_path: Path) -> None:
    """Rank 0 reads its trace for seconds, which the others wait for."""
    (tmp_path / "slow.py").write_text(SLOW)
    words = [*WORDS[: WORDS.index("--model.name")], *WORDS[WORDS.index("--device") :]]
    words += ["--model.name", "slow.py:build", "--nproc", "2", "--run.per_rank_metrics", "true"]
    done = host.run("train", *words, "--run.profile", "1step", "--run.duration", "8step", cwd=tmp_path)
    assert done.code == 0, done.said
    assert "profile: " in done.said
    assert "N030" not in done.said
    for rank in range(2):
        lines = map(json.loads, (tmp_path / f"runs/run/metrics.rank{rank}.jsonl").read_text().splitlines())
        assert max(line["step_seconds"] for line in lines if "step_seconds" in line) < 2
