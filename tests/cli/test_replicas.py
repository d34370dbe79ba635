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
