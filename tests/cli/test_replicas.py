"""`run.check_replicas` and `run.sync_batch_norm` of a recipe on two ranks: heeded, or rejected where they cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.host import Host
from tests.cli.test_train import losses

MODEL = """
import torch, torch.distributed as dist
from torch import nn

class Normed(nn.Module):
    num_outputs = 8

    def __init__(self):
        super().__init__()
        self.norm, self.out, self.calls = nn.BatchNorm2d(3), nn.Linear(192, 8), 0

    def forward(self, images):
        return self.out(self.norm(images).flatten(1))

class Flipping(Normed):
    def forward(self, images):
        self.calls += self.training
        if self.calls == 3 and dist.get_rank() == 1:
            self.out.weight.data.view(torch.int32)[0, 0] ^= 1
        return super().forward(images)
"""
WORDS = [
    *["train", "--data.source", "synthetic", "--data.synthetic_kind", "images", "--data.image_size", "8"],
    *["--data.vocabulary", "8", "--data.global_batch", "8", "--data.synthetic_samples", "64", "--data.workers", "0"],
    *["--device", "cpu", "--launch.threads", "1", "--launch.nproc", "2", "--run.duration", "4step"],
    *["--checkpoint.every", "0step"],
]


@pytest.fixture
def folder(host: Host, tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "own.py").write_text(MODEL)
    yield tmp_path
    host.kill_what_runs()


def test_a_flipped_bit_ends_a_run_of_a_recipe(host: Host, folder: Path) -> None:
    words = [*WORDS, "--model.name", "own.py:Flipping", "--run.check_replicas", "2step"]
    done = host.run(*words, "--run.dir", "run", cwd=folder)
    assert done.code == 3
    text = " ".join(done.err.read_text().split())
    assert "after step 4, copies of tensors are not the same on all ranks" in text
    assert "out.weight: ranks 0 and 1 differ" in text
    assert "They were the same after step 2" in text


def test_a_gradient_that_was_wrong_once_is_computed_again(host: Host, folder: Path) -> None:
    """The wrong update is not made: the run restarts, and its losses are those of a run without a fault."""
    words = [*WORDS, "--model.name", "own.py:Normed", "--run.check_compute", "2step", "--checkpoint.every", "1step"]
    plain = host.run(*words, "--run.dir", "plain", cwd=folder)
    assert plain.code == 0, plain.said
    faulty = host.run(*words, "--run.dir", "run", cwd=folder, env={"SHOAL_FAULTS": "flip_gradient_at=rank:1,step:4"})
    assert faulty.code == 0, faulty.said
    assert "rank 1 computed wrong once: in step 4, its gradient of norm.weight differs" in faulty.said
    assert "restarting all workers from the last checkpoint" in faulty.said
    assert losses(folder / "run") == losses(folder / "plain")
    always = {"SHOAL_FAULTS": "flip_gradient_from=rank:1,step:3,generation:any"}
    ended = host.run(*words, "--run.dir", "always", cwd=folder, env=always)
    assert ended.code == 3
    assert "ranks 0 and 1 compute different gradients of norm.weight" in ended.said
    assert "a checkpoint of step 2 or before" in ended.said


def test_statistics_of_the_whole_batch_are_those_of_one_rank(host: Host, folder: Path) -> None:
    words = [*WORDS, "--model.name", "own.py:Normed", "--run.sync_batch_norm", "true", "--plan", "fp64"]
    for name, nproc in (("two", "2"), ("one", "1")):
        done = host.run(*words, "--launch.nproc", nproc, "--run.dir", name, cwd=folder)
        assert done.code == 0, done.err.read_text()
    assert losses(folder / "two") == pytest.approx(losses(folder / "one"), rel=1e-10)


def test_what_makes_no_sense_is_rejected_before_anything_starts(host: Host, folder: Path) -> None:
    words = [*WORDS, "--model.name", "mlp", "--run.sync_batch_norm", "true", "--run.check_replicas", "5min"]
    done = host.run(*words, cwd=folder)
    text = " ".join(done.err.read_text().split())
    assert done.code == 2
    assert "sync_batch_norm needs a batch norm in the model, got none" in text
    assert "--run.check_replicas 100step" in text
    done = host.run(*WORDS, "--model.name", "mlp", "--run.check_compute", "2step", "--plan", "zero=2", cwd=folder)
    assert done.code == 2
    assert "check_compute needs ranks that compute alone and hold the whole model, and the plan is" in done.said
