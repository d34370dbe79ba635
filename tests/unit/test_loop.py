"""The training loop: the learning rate of each step, and the initial weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shoal.config.load import build_recipe
from shoal.train.recipe.invocation import RunInvocation
from shoal.train.recipe.loop import _lr_factor, train
from shoal.train.recipe.preflight import Job, preflight
from tests.rejects import rejects


def job(**sections: Any) -> Job:
    data = {"source": "synthetic", "seq_len": 16, "global_batch": 4, "validation": 0, "workers": 0}
    model = {"preset": "tiny", "num_layers": 1, "hidden": 32, "ffn": 48}
    tree = {"model": model, "data": data, "launch": {"device": "cpu", "threads": 1}, **sections}
    return preflight(build_recipe(tree, title="test"), 1)


def factors(steps: list[int], **sections: Any) -> list[float]:
    a_job = job(**sections)
    num_steps = a_job.recipe.run.duration.steps(batch=4, samples_per_epoch=1, tokens_per_sample=1)
    return [_lr_factor(a_job, step, step / num_steps if num_steps else 0.0) for step in steps]


def test_a_long_run_warms_up_step_by_step() -> None:
    """Once the first thousandth of a run was clamped, and a short warm-up in a long run was skipped."""
    found = factors([1, 10, 1000, 1_000_000], run={"duration": "1e6step"}, optim={"warmup": "1000step"})
    assert found == pytest.approx([0.001, 0.01, 1.0, 0.1])


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    found = factors([1, 50, 100], run={"duration": "100step"}, optim={"warmup": "200step"})
    assert found == pytest.approx([1 / 200, 50 / 200, 100 / 200])


def test_steps_warm_up_a_run_by_the_clock() -> None:
    found = factors([1, 5, 10, 11], run={"duration": "10min"}, optim={"warmup": "10step", "schedule": "constant"})
    assert found == pytest.approx([0.1, 0.5, 1.0, 1.0])


def test_the_first_step_by_the_clock_is_not_wasted() -> None:
    assert factors([1], run={"duration": "10min"}, optim={"warmup": "1min"})[0] > 0


def test_the_learning_rate_in_the_metrics_is_the_schedule(tmp_path: Path) -> None:
    sections = {"run": {"duration": "8step", "dir": str(tmp_path / "run")}, "optim": {"lr": 0.01, "warmup": "2step"}}
    train(None, None, job(**sections), RunInvocation(quiet=True, start_time=0.0))
    rates = [json.loads(line)["lr"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    expected = [0.005, 0.01, *(0.01 * (0.1 + 0.9 * (1 + math.cos(math.pi * k / 6)) / 2) for k in range(1, 7))]
    assert rates == pytest.approx(expected)


def test_a_batch_of_more_samples_than_the_data_has_gets_a_note(capfd: pytest.CaptureFixture[str]) -> None:
    data = {"source": "synthetic", "seq_len": 16, "global_batch": 4, "synthetic_samples": 3, "validation": 0}
    small = job(run={"duration": "1step"}, data={**data, "workers": 0})
    train(None, None, small, RunInvocation(save=False, start_time=0.0))
    said = " ".join(capfd.readouterr().err.split())
    assert "a step has 4 samples and the data 3: samples repeat within a step; not with --data.global_batch 3" in said


MODEL = """
import torch
from torch import nn

class Zeroed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))
"""


def test_a_users_model_starts_with_its_own_weights(tmp_path: Path) -> None:
    """A head of zeros gives every token the same chance; pretrained weights would be lost in the same way."""
    (tmp_path / "zeroed.py").write_text(MODEL)
    invocation = RunInvocation(save=False, quiet=True, start_time=0.0)
    summary = train(None, None, job(model=f"{tmp_path}/zeroed.py:Zeroed", run={"duration": "1step"}), invocation)
    assert summary["loss_first"] == pytest.approx(math.log(256), rel=1e-6)


INTERRUPTED = """
import os
import signal
import sys
import torch
from torch import nn

class Interrupted(nn.Module):
    def __init__(self, at_step):
        super().__init__()
        self.embedding, self.head, self.at_step, self.calls = nn.Embedding(256, 8), nn.Linear(8, 256), at_step, 0

    def forward(self, tokens):
        self.calls += not tokens.is_meta  # checks call it without memory
        if self.calls == self.at_step and not tokens.is_meta:
            os.kill(os.getpid(), signal.SIGINT)
            print("still in the forward", file=sys.stderr)
        return self.head(self.embedding(tokens))
"""


@pytest.mark.parametrize("at_step", [1, 3])
def test_who_is_interrupted_answers_once_and_in_a_long_first_step_at_once(
    at_step: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A first step that compiles takes half a minute: whoever heard nothing pressed Ctrl-C again, and lost the run."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    model = {"name": f"{tmp_path}/interrupted.py:Interrupted", "at_step": at_step}
    summary = train(
        None, None, job(model=model, run={"duration": "9step"}), RunInvocation(save=False, quiet=True, start_time=0.0)
    )
    assert (summary["was_stopped"], summary["steps"]) == (True, at_step + 1)
    said = ["stopping after the next step; press Ctrl-C again to end at once", "still in the forward"]
    assert capfd.readouterr().err.splitlines() == (said if at_step == 1 else said[::-1])


def test_a_first_step_that_compiles_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.compile", lambda forward, **_: forward)  # this is about the line
    for compiles in (False, True):
        train(
            None, None, job(run={"duration": "1step", "compile": compiles}), RunInvocation(save=False, start_time=0.0)
        )
        assert ("the first step compiles" in capfd.readouterr().err) == compiles


def test_a_restart_that_finds_nothing_of_what_was_saved_does_not_start_over(tmp_path: Path) -> None:
    where = {"duration": "1step", "dir": str(tmp_path / "run")}
    for saved_before in (3, 0):
        a_job = job(run=where)
        invocation = RunInvocation(quiet=True, start_time=0.0, generation=1, saved_before=saved_before)
        if saved_before:
            with rejects("N069", "find no checkpoint, but step 3 of this run was saved"):
                train(None, None, a_job, invocation)
        else:
            assert train(None, None, a_job, invocation)["steps"] == 1


def test_a_restart_that_finds_only_an_older_step_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two neighbours were lost at once: committed steps are made again, and no line said it."""
    where = {"dir": str(tmp_path / "run")}
    train(None, None, job(run={**where, "duration": "2step"}), RunInvocation(quiet=True, start_time=0.0))
    for saved_before, found in ((2, 2), (7, 4)):
        longer = job(run={**where, "duration": f"{found + 2}step"})
        invocation = RunInvocation(quiet=True, start_time=0.0, generation=1, saved_before=saved_before)
        assert train(None, None, longer, invocation)["resumed_from"] == found
        said = "step 7 of this run was saved, but the hosts that are left hold no newer one than step 4"
        assert (said in capfd.readouterr().err.replace("\n", " ")) == (saved_before == 7)
