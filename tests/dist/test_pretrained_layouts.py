"""The weights of a folder on the ranks of a layout: every rank has its part of them, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.blueprint.plan import Plan
from shoal.checkpoint.load_tensors import load_tensors
from shoal.checkpoint.state.model_state import local_shards
from shoal.comm.world import World
from shoal.config.recipe import ModelSection
from shoal.numerics.init import initialise
from shoal.train.build_model import build_for_layout, build_model, without_memory
from shoal.train.run import Run
from shoal.train.run_checkpoint import holder_of
from shoal.verification.case import Case
from shoal.verification.rank import verify_in
from shoal.verification.recipe.random_batches import random_batch_of
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


def differing_in_a_loop(world: World, folder: str, plans: list[str]) -> list[str]:
    """The same for a loop of one's own: `shoal.from_pretrained`, with an optimizer of several groups and a schedule."""
    kind: Any = type(shoal.from_pretrained(folder)).__mro__[1]
    expected = kind.from_pretrained(folder, dtype=torch.float32).state_dict()
    wrong = []
    for plan in plans:
        run = Run(plan, world=world)
        model = shoal.from_pretrained(f"hf:{folder}")
        norms = {p for name, p in model.named_parameters() if "norm" in name}
        groups = [{"params": [p for p in model.parameters() if p not in norms]}, {"params": list(norms), "lr": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        run.prepare(model, optimizer, schedule)
        wrong += [f"{plan} {name}" for name in other_shards(run, expected)]
        held = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
        own = [{id(p) for name, p in run.composed.named.items() if ("norm" in name) == last} for last in (False, True)]
        wrong += [] if held == own else [f"{plan}: other parameters in a group"]
    return wrong


def verified(world: World, folder: str, is_broken: bool) -> bool | None:
    """Whether a verification of the folder finds nothing, on rank 0."""
    from shoal.checkpoint import load_tensors as module

    whole = module.fill

    def wrong(shard: Any, tensor: Any) -> None:
        whole(shard, tensor)
        if "norm" in shard.name:
            shard.value.add_(1e-6)

    plan = Plan.of("dp_shard=2 zero=3 fp64").resolve(2)
    build = functools.partial(shoal.from_pretrained, folder)
    module.fill = wrong if is_broken else whole
    try:
        case = Case(build=build, batches=[random_batch_of(build, plan, 2, 0)], plan=plan, lr=1e-4)
        verdict = verify_in(world, case).verdict
    finally:
        module.fill = whole
    return None if verdict is None else verdict.equal


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


@pytest.mark.parametrize("kind", ["llama tied", wide("mixtral"), wide("gpt2")])
def test_a_loop_of_ones_own_reads_its_part_of_the_weights(pool: Pool, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model: Any = huggingface.build(kind)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    plans = [plan for plan in PLANS if plan.split()[0] not in huggingface.REJECTED.get(kind, ())]
    assert pool.run(differing_in_a_loop, 2, str(tmp_path), plans) == [[], []]


def test_a_verification_starts_with_the_weights_of_the_folder(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    huggingface.build("llama tied").save_pretrained(tmp_path)
    assert pool.run(verified, 2, str(tmp_path), False) == [True, None]
    assert pool.run(verified, 2, str(tmp_path), True) == [False, None]
