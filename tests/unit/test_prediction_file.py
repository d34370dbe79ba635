"""The prediction beside a run whose model is no preset: it is traced."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.overrides import parse
from shoal.cli.train import Train
from shoal.config.load import load_recipe
from shoal.train.recipe.predict_step import append_measurement, predict_step, write_prediction

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
        write_prediction(recipe.model_copy(update={"plan": recipe.plan.resolve(1)}), tmp_path, 1)
        found = json.loads((tmp_path / "prediction.json").read_text())
        assert set(found) == {"step_seconds", "memory_gib", "is_calibrated"}
        assert found["step_seconds"] > 0
        sizes.append(found["memory_gib"])
    assert 0 < sizes[0] < sizes[1]


def test_ranks_of_several_hosts_are_predicted_with_the_link_between_them(tmp_path: Path) -> None:
    """By both ways to write a prediction, and in the table that `shoal backtest` reads."""
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "tiny.yaml", [("launch.device", "cpu")])
    recipe = recipe.model_copy(update={"plan": recipe.plan.parse("dp_replicate=4 mb=1").resolve(4)})
    measured = {"step_seconds_median": 1.0, "memory_gib_max": 1.0, "tokens_per_s": 4.0, "ranks": 4}
    seconds: dict[int, set[float]] = {}
    for per_host in (4, 2):
        summary = {**measured, "ranks_per_host": per_host, "run_directory": str(tmp_path)}
        assert append_measurement(recipe, summary, tmp_path / "measured.csv")
        seconds[per_host] = {json.loads((tmp_path / "prediction.json").read_text())["step_seconds"]}
        write_prediction(recipe, tmp_path, per_host)
        seconds[per_host].add(json.loads((tmp_path / "prediction.json").read_text())["step_seconds"])
    (on_one,), (on_two,) = seconds.values()
    assert on_two > on_one
    rows = list(csv.DictReader((tmp_path / "measured.csv").read_text().splitlines()))
    assert [row["cluster"].partition(":")[2] for row in rows] == ["4", "2x2"]
    assert float(rows[1]["predicted_s"]) > float(rows[0]["predicted_s"])


def test_lora_is_predicted_where_all_linear_layers_have_it() -> None:
    def found(*settings: tuple[str, str]) -> dict[str, Any]:
        recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "tiny.yaml", [("launch.device", "cpu"), *settings])
        return predict_step(recipe.model_copy(update={"plan": recipe.plan.parse("mb=1").resolve(1)}))

    whole, adapted = found(), found(("model.lora.rank", "4"))
    assert adapted["memory"]["optimizer"] == 8 * adapted["trained_parameters"] < whole["memory"]["optimizer"]
    assert adapted["flops"] < whole["flops"]
    assert "LoRA on some" in found(("model.lora.targets", "[q_proj]"))["not_predicted"]
