"""The prediction beside a run whose model is no preset: it is traced."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.overrides import parse
from shoal.cli.train import Train
from shoal.train.recipe.predict_step import write_prediction

NET = """\
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(257, 32), nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 257)

    def forward(self, tokens):
        return self.head(self.rnn(self.embedding(tokens))[0])
"""


def test_a_model_that_is_no_preset_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    words = ["--model.name", "net.py:Net", "--data.source", "synthetic", "--data.seq_len", "8"]
    sizes = []
    for batch in ("4", "64"):
        _, reading = parse(Train, [*words, "--data.global_batch", batch, "--device", "cpu"], prog="shoal train")
        recipe = reading.complete()
        write_prediction(recipe.model_copy(update={"plan": recipe.plan.resolve(1)}), tmp_path)
        found = json.loads((tmp_path / "prediction.json").read_text())
        assert set(found) == {"step_seconds", "memory_gib", "is_calibrated"}
        assert found["step_seconds"] > 0
        sizes.append(found["memory_gib"])
    assert 0 < sizes[0] < sizes[1]
