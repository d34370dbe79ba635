"""The weights of a folder on the ranks of a layout: every rank has its part of them, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.load_tensors import load_tensors
from shoal.checkpoint.state.model_state import local_shards
from shoal.comm.world import World
from shoal.config.recipe import ModelSection
from shoal.numerics.init import initialise
from shoal.train.build_model import build_for_layout, build_model, without_memory
from shoal.train.run import Run
from shoal.train.run_checkpoint import holder_of
from tests.cover import wide
from tests.dist.pool import Pool

pytest.importorskip("transformers")
from tests import huggingface

PLANS = ["zero=3", "tp=2 sp=off", "pp=2 1f1b"]


def differing(world: World, folder: str, plans: list[str]) -> list[str]:
    """Names of shards of a rank that differ from the tensors of `from_pretrained`."""
    from shoal.models.huggingface import weights_of

    whole = without_memory(lambda: build_model(ModelSection(name=f"hf:{folder}")))
    assert whole is not None
    kind: Any = type(whole).__mro__[1]
    expected = kind.from_pretrained(folder, dtype=torch.float32).state_dict()
    wrong = []
    for plan in plans:
        run = laid_out(world, folder, plan, is_loaded_later=True)
        load_tensors(world, holder_of(run), weights_of(whole, Path(folder)), folder)
        wrong += [f"{plan} {name}" for name in other_shards(run, expected)]
    return wrong


def drawn_otherwise(world: World, folder: str, plans: list[str]) -> list[str]:
    """Names of shards of a rank that differ from the random weights of one process."""
    whole = build_model(ModelSection(name=f"hf:{folder}"))
    initialise(whole, 0)
    runs = {plan: laid_out(world, folder, plan, is_loaded_later=False) for plan in plans}
    return [f"{plan} {name}" for plan, run in runs.items() for name in other_shards(run, whole.state_dict())]


def laid_out(world: World, folder: str, plan: str, *, is_loaded_later: bool) -> Run:
    run = Run(plan, world=world)  # not closed: the world is the next test's
    model: Any = build_for_layout(ModelSection(name=f"hf:{folder}"), 0)
    model.is_loaded_later = is_loaded_later
    run.prepare(model)
    run.prepare(torch.optim.SGD(run.parameters, lr=0.1))
    return run


def other_shards(run: Run, expected: dict[str, Tensor]) -> list[str]:
    wrong, seen = [], 0
    for shard in local_shards(holder_of(run)):
        full = expected[shard.name.removeprefix("model/")]
        box = tuple(slice(b, b + s) for b, s in zip(shard.begin, shard.value.shape, strict=True))
        wrong += [] if torch.equal(shard.value, full[box]) else [shard.name]
        seen += shard.value.numel()
    assert seen >= sum(tensor.numel() for tensor in expected.values()) // 3
    return wrong


def test_a_tied_weight_is_drawn_alike_on_both_stages(pool: Pool, tmp_path: Path) -> None:
    model: Any = huggingface.build("llama tied")
    model.config.save_pretrained(tmp_path)
    assert pool.run(drawn_otherwise, 2, str(tmp_path), ["pp=2 1f1b", "zero=3"]) == [[], []]


@pytest.mark.parametrize("kind", ["llama tied", "mixtral", wide("gpt2"), wide("deepseek-v3")])
def test_each_rank_has_its_part_of_the_weights(pool: Pool, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model: Any = huggingface.build(kind)
    model = model.to(torch.bfloat16) if kind == "llama tied" else model  # files in another dtype than the run's
    model.save_pretrained(tmp_path)
    plans = [plan for plan in PLANS if plan.split()[0] not in huggingface.REJECTED.get(kind, ())]
    plans += ["ep=2 zero=3"] if kind in huggingface.EXPERTS else []
    assert pool.run(differing, 2, str(tmp_path), plans) == [[], []]
