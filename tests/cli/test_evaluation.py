"""A run that is stopped while it evaluates loses no step, and evaluates when it resumes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.host import Host, Started, until
from tests.cli.test_resume import committed, hexed
from tests.cli.test_train import losses, records
from tests.cover import wide

MODEL = """
import os, time
from torch import nn

class Slow(nn.Module):
    num_outputs = 64

    def __init__(self, hidden=16):
        super().__init__()
        self.embed, self.out = nn.Embedding(64, hidden), nn.Linear(hidden, 64)

    def forward(self, tokens):
        if not self.training and "SLOW" in os.environ:
            time.sleep(0.1)
            open(f"evaluates-{os.environ.get('RANK', 0)}", "w").close()
        return self.out(self.embed(tokens))
"""
WORDS = [
    *["train", "--model.name", "own.py:Slow", "--data.source", "synthetic", "--data.vocabulary", "64"],
    *[
        "--data.seq_len",
        "8",
        "--data.global_batch",
        "4",
        "--data.synthetic_samples",
        "1024",
        "--data.validation",
        "0.5",
    ],
    *["--data.workers", "0", "--device", "cpu", "--launch.threads", "1", "--run.dir", "run"],
    *["--checkpoint.every", "0step", "--run.duration", "3step"],
]
SLOW = {"SLOW": "1"}  # 128 batches, a tenth of a second each


@pytest.fixture
def folder(host: Host, tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "own.py").write_text(MODEL)
    yield tmp_path
    host.kill_what_runs()


def evaluating(host: Host, *words: str, folder: Path) -> Started:
    """A run in the middle of an evaluation that would take long."""
    started = host.start(*words, cwd=folder, env=SLOW)
    until(lambda: any(folder.glob("evaluates-*")), started)
    return started


def evaluations(folder: Path, name: str = "run") -> list[tuple[int, float]]:
    return [(record["step"], record["eval_loss"]) for record in records(folder / name) if "eval_loss" in record]


@pytest.mark.parametrize(
    ("plan", "nproc", "asked"),
    [
        pytest.param("fp64", 1, None, id="one"),
        pytest.param("fp64", 2, None, id="two", marks=pytest.mark.wide),
        pytest.param("fp64", 2, 1, id="the second of two", marks=pytest.mark.wide),
        pytest.param("fp64 zero=3", 2, 0, id="the first of two that meet"),
        pytest.param("fp64 sync=diloco:2", 2, None, id="local SGD", marks=pytest.mark.wide),
    ],
)
def test_who_is_asked_to_stop_in_the_last_evaluation(
    host: Host, folder: Path, plan: str, nproc: int, asked: int | None
) -> None:
    """`asked` is the rank that gets the signal; None: the command does, which passes it on."""
    words = [*WORDS, "--nproc", str(nproc), "--plan", plan, "--json"]
    whole = host.run(*words, "--run.dir", "whole", cwd=folder)
    assert whole.code == 0, whole.said
    started = evaluating(host, *words, folder=folder)
    until(lambda: committed(folder / "run" / "checkpoints") == 3, started)  # the evaluation goes on for long
    os.kill(started.pid if asked is None else started.workers[asked], signal.SIGTERM)
    began = time.monotonic()
    assert started.wait() == 130, started.said
    assert time.monotonic() - began < 5
    assert started.said == "stopping without the rest of the evaluation; press Ctrl-C again to end at once\n"
    told = started.json
    assert (told["was_stopped"], told["steps"], told["saved_step"], told["eval_loss"]) == (True, 3, 3, None)
    assert evaluations(folder) == []
    ended = host.run(*words, cwd=folder)
    assert (ended.code, ended.json["resumed_from"], ended.json["was_stopped"]) == (0, 3, False), ended.said
    assert evaluations(folder) == evaluations(folder, "whole") == [(3, ended.json["eval_loss"])]
    assert host.run(*words, cwd=folder).code == 2  # now it has ended


def test_a_person_is_told_that_it_evaluates_and_how_it_was_stopped(host: Host, folder: Path) -> None:
    words = [*WORDS, "--nproc", "1"]
    started = host.start(*words, cwd=folder, env=SLOW)
    until(lambda: " of 512 samples" in started.said, started)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 130
    assert started.told.startswith("stopped early")
    assert "it starts at step 3" in started.told
    ended = host.run(*words, cwd=folder)
    assert ended.code == 0, ended.said
    assert "all made before" in ended.told
    assert f"{evaluations(folder)[0][1]:.4f}" in ended.told


@pytest.mark.parametrize("nproc", [wide(1), 2])
def test_who_is_asked_to_stop_in_an_evaluation_on_the_way(host: Host, folder: Path, nproc: int) -> None:
    words = [*WORDS, "--nproc", str(nproc), "--plan", "fp64", "--run.evaluate_every", "2step", "--json"]
    words += ["--run.duration", "5step"]
    whole = host.run(*words, "--run.dir", "whole", cwd=folder)
    assert whole.code == 0, whole.said
    started = evaluating(host, *words, folder=folder)
    os.kill(started.pid, signal.SIGTERM)
    began = time.monotonic()
    assert started.wait() == 130, started.said
    assert time.monotonic() - began < 5
    assert (started.json["steps"], started.json["saved_step"], committed(folder / "run" / "checkpoints")) == (2, 2, 2)
    ended = host.run(*words, cwd=folder)
    assert (ended.code, ended.json["resumed_from"]) == (0, 2), ended.said
    assert hexed(losses(folder / "run")) == hexed(losses(folder / "whole"))
    assert evaluations(folder) == evaluations(folder, "whole")
    assert [step for step, _ in evaluations(folder)] == [2, 4, 5]


def test_an_evaluation_that_was_made_is_neither_forgotten_nor_made_again(host: Host, folder: Path) -> None:
    words = [*WORDS, "--nproc", "1", "--run.evaluate_every", "3step", "--json"]
    first = host.run(*words, cwd=folder)
    assert first.code == 0, first.said
    longer = host.run(*words, "--resume", "latest", "--run.duration", "4step", cwd=folder)
    assert longer.code == 0, longer.said
    assert [step for step, _ in evaluations(folder)] == [3, 4]
    started = evaluating(host, *words, "--resume", "latest", "--run.duration", "5step", folder=folder)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 130, started.said
    assert started.json["eval_loss"] == longer.json["eval_loss"]  # of step 4, which was saved before it was known


def test_a_worker_that_dies_in_the_last_evaluation_costs_no_step(host: Host, folder: Path) -> None:
    started = evaluating(host, *WORDS, "--nproc", "2", "--plan", "fp64", "--json", folder=folder)
    until(lambda: committed(folder / "run" / "checkpoints") == 3, started)
    os.kill(started.workers[1], signal.SIGKILL)
    until(lambda: "restart 1 of 3" in started.said, started)
    for path in folder.glob("evaluates-*"):
        path.unlink()
    until(lambda: any(folder.glob("evaluates-*")), started)
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 130, started.said
    assert (started.json["restarts"], started.json["resumed_from"], started.json["steps"]) == (1, 3, 3)
