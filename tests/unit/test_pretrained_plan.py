"""`shoal plan` of models of transformers whose config does not show their costs: they are traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import shoal
from shoal.config.recipe import Recipe
from shoal.planner.answer import to_mapping
from shoal.train.recipe.auto_plan import model_of, workload_for
from tests.cover import wide
from tests.rejects import rejects

pytest.importorskip("transformers")
from tests import huggingface

TOKENS = 8
KINDS = ["t5", "vit", "mamba", "albert", "jamba", *map(wide, ("whisper", "bart", "swin", "lfm2", "qwen3-next"))]


def config_of(folder: Path, kind: str) -> Any:
    model: Any = huggingface.build(kind)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_no_stack_of_decoders_is_traced(tmp_path: Path, kind: str) -> None:
    model = config_of(tmp_path, kind)
    answer = shoal.plan(f"hf:{tmp_path}", cluster="h100:8", seq_len=TOKENS, global_batch=64)
    workload = answer.task.workload
    assert answer.best
    assert not workload.is_transformer
    assert workload.parameters == sum(parameter.numel() for parameter in model.parameters())
    description_axes = {axis for axis in ("tp", "pp", "cp") if workload.is_left_out(axis)}
    expected = {"t5": {"cp"}, "vit": {"cp"}, "mamba": {"cp", "tp"}, "albert": {"pp"}, "jamba": {"cp"}}
    assert description_axes == expected.get(kind, description_axes)
    degrees = {choice.prediction.plan.layout.pp for choice in answer.best}
    assert "pp" not in description_axes or degrees == {1}
    reasons = {one["move"]: one["reason"] for one in to_mapping(answer)["rejected"]}
    assert all("a run rejects it" in next(r for axes, r in reasons.items() if axes == one) for one in description_axes)


def test_flops_are_those_of_the_forward(tmp_path: Path) -> None:
    model = config_of(tmp_path, "t5")
    workload = shoal.plan(f"hf:{tmp_path}", cluster="h100:8", seq_len=TOKENS).task.workload
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens)
    assert sum(block.flops for block in workload.blocks) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    config_of(tmp_path, "vit")
    path = (tmp_path / "config.json").rename(tmp_path / "mine.json")
    assert "vocab_size" in json.loads(path.read_text())  # it would pass for one of a text model
    answer = shoal.plan(str(path), cluster="h100:8")
    assert answer.task.sequence == 1
    assert answer.task.workload.parameters == sum(p.numel() for p in huggingface.build("vit").parameters())


def test_the_planner_of_a_recipe_traces_it(tmp_path: Path) -> None:
    config_of(tmp_path, "vit")
    data = {"source": "synthetic", "synthetic_kind": "images", "image_size": 12}
    recipe = Recipe.model_validate({"model": {"name": f"hf:{tmp_path}", "init": "random"}, "data": data})
    workload = workload_for(recipe, model_of(recipe))
    assert workload.blocks
    assert workload.parameters == sum(p.numel() for p in huggingface.build("vit").parameters())


def test_a_model_that_cannot_be_traced_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange", "hidden_size": 8}))
    with rejects("Q022", "layers", "'strange'"):
        shoal.plan(f"hf:{tmp_path}", cluster="h100:8")
