"""`--deepspeed ds_config.json`: below the command line, above the recipe, and said in a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.cli.overrides import parse
from shoal.cli.train import Train
from shoal.config.recipe import Recipe
from tests.cli.host import Host
from tests.rejects import rejects

CONFIG = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
    "gradient_clipping": 0.5,
}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "ds_config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return str(path)


def recipe_of(*words: str) -> Recipe:
    return parse(Train, words, prog="shoal train")[1].complete()


def test_the_config_is_above_the_recipe_and_below_the_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    lines = ["plan: dp_replicate=2 mb=1", "optim: {lr: 0.5, clip: 9.0}", "data: {global_batch: 64, seq_len: 32}"]
    recipe.write_text("\n".join(lines))
    found = recipe_of(str(recipe), "--deepspeed", write(tmp_path), "--nproc", "2", "--optim.clip", "0.25")
    assert (found.data.global_batch, found.data.seq_len) == (8, 32)
    assert (found.optim.lr, found.optim.clip, found.optim.betas) == (0.02, 0.25, (0.9, 0.999))
    assert found.plan.resolve(2).brief() == "dp_shard=2 zero=2 mb=2"
    typed = recipe_of(str(recipe), "--deepspeed", write(tmp_path), "--nproc", "2", "--plan", "zero=3 mb=4")
    assert typed.plan.resolve(2).brief() == "dp_shard=2 zero=3 mb=4"


@pytest.mark.parametrize(
    ("plan", "words", "batch"),
    [
        ("mb=1", [], 8),
        ("mb=1", ["--plan.tp", "2"], 4),
        ("mb=1", ["--plan", "tp=2 pp=2"], 2),
        ("cp=2", ["--plan.tp", "2"], 2),
        ("tp=4", ["--plan.tp", "1"], 8),
        ("ep=2 dp_shard=4", [], 8),  # ep ranks have samples of their own
        ("auto", ["--plan.tp", "2", "--plan.pp", "1", "--plan.cp", "1"], 4),
    ],
)
def test_ranks_that_share_samples_count_once(tmp_path: Path, plan: str, words: list[str], batch: int) -> None:
    (tmp_path / "recipe.yaml").write_text(f"plan: {plan}")
    (tmp_path / "sizes.json").write_text('{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}')
    given = [str(tmp_path / "recipe.yaml"), "--deepspeed", str(tmp_path / "sizes.json"), "--nproc", "4", *words]
    assert recipe_of(*given).data.global_batch == batch


def test_no_batch_follows_from_degrees_that_the_planner_chooses(tmp_path: Path) -> None:
    (tmp_path / "sizes.json").write_text('{"train_micro_batch_size_per_gpu": 2}')
    with rejects("E007", "unknown number of ranks"):
        recipe_of("--deepspeed", str(tmp_path / "sizes.json"), "--nproc", "4", "--run.planned", "true")


def test_the_table_says_what_became_of_each_key(tmp_path: Path) -> None:
    words = ["--deepspeed", write(tmp_path), "--nproc", "2", "--plan.zero", "1"]
    _, reading = parse(Train, words, prog="shoal train")
    [note] = reading.notes
    said = {line.split()[0]: line for line in note.splitlines()[1:]}
    assert "overridden by --plan.zero" in said["zero_optimization.stage"]
    assert "no effect here" in said["zero_optimization.overlap_comm"]
    assert "--optim.clip 0.5" in said["gradient_clipping"]
    assert "--optim.loss_mean microbatch" in note
    assert {line["key"] for line in reading.translated} >= {"gradient_clipping", "optimizer.params.lr"}


def test_problems_of_config_and_command_come_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, zero_optimisation={}, train_micro_batch_size_per_gpu=3)
    assert main(["train", "--deepspeed", config, "--nproc", "2", "--optim.epss", "1"]) == 2
    printed = capsys.readouterr().err
    assert all(code in printed for code in ("E004", "E006", "R011"))
    assert main(["train", "--deepspeed", str(tmp_path / "missing.json")]) == 2
    assert "E001" in capsys.readouterr().err


def test_it_trains(tmp_path: Path, host: Host) -> None:
    model = "--model.hidden 32 --model.num_layers 1 --model.num_heads 2 --model.num_kv_heads 2 --model.ffn 64"
    data = "--data.source synthetic --data.seq_len 8 --data.synthetic_samples 32 --data.validation 0"
    words = f"{model} {data} --run.duration 2step --json --device cpu --nproc 2 --deepspeed {write(tmp_path)}"
    started = host.start("train", *words.split(), cwd=tmp_path)
    assert started.wait() == 0, started.told
    summary = started.json
    assert summary["steps"] == 2
    assert "zero=2" in summary["plan"]
    assert {line["setting"] for line in summary["deepspeed"]} >= {"--plan.zero 2", "--optim.clip 0.5"}


def test_plan_has_the_words_of_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path, train_batch_size=64, zero_optimization={"stage": 3}, bf16={"enabled": True})
    assert main(["plan", "llama3-8b", "--cluster", "h100:8", "--deepspeed", config, "--json", "--seq-len", "2048"]) == 0
    answer = json.loads(capsys.readouterr().out)
    [plan] = answer["plans"]
    assert "dp_shard=8" in plan["plan"]
    assert "zero=3" in plan["plan"]
    assert "mb=4 bf16" in plan["plan"]
    assert answer["translated"]


@pytest.mark.parametrize("typed", [["--tp", "2"], ["--plan", "tp=2"]])
def test_typed_degrees_change_the_batch_of_a_plan(
    tmp_path: Path, typed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "sizes.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}')
    words = ["plan", "llama3-8b", "--cluster", "h100:8", "--deepspeed", str(config), "--json", "--seq-len", "2048"]
    assert main([*words, *typed]) == 0
    lines = {line["key"]: line["setting"] for line in json.loads(capsys.readouterr().out)["translated"]}
    assert lines["train_batch_size"] == "--data.global_batch 8"
    assert (
        main(["plan", "llama3-8b", "--cluster", "h100:8", "--deepspeed", str(tmp_path / "missing.json"), *typed]) == 2
    )
    assert "E001" in capsys.readouterr().err
