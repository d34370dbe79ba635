"""The proof of the step: one recipe on 1, 2 and 4 ranks, and a loop in plain torch, give the same losses and weights.

In float64 a right layout differs by rounding (1e-15), a wrong one by 1e-2. The reference below shares with shoal only
what it is given: the initial weights and which samples are in which batch.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.config.load import build_recipe
from shoal.config.recipe import Recipe
from shoal.data.loader import Loader, RankStream
from shoal.data.order import sample_ids
from shoal.data.sources.open import open_datasets
from shoal.numerics.init import initialise
from shoal.numerics.lr_schedule import lr_factor
from shoal.numerics.optim.build import build_optimizer, set_lr
from shoal.train.build_model import build_model
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import Pool

STEPS = 6
BATCH = 8


def recipe(**data: Any) -> Recipe:
    tree = {
        "model": {"name": "llama", "preset": "tiny", "num_layers": 2, "hidden": 32, "ffn": 48, "tied": True},
        "data": {"source": "python", "seq_len": 48, "global_batch": BATCH, **data},
        "optim": {"lr": 1e-2, "clip": 0.7, "warmup": "2step", "weight_decay": 0.1},
        "plan": "fp64 mb=2",
        "run": {"duration": f"{STEPS}step", "seed": 5},
    }
    return build_recipe(tree, title="test")


def train_with_shoal(world: World, recipe: Recipe) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and final weights of one rank."""
    dataset, _ = open_datasets(recipe.data, recipe.run.seed)
    run = Run(recipe.plan, seed=recipe.run.seed, clip=recipe.optim.clip, world=world)
    model = build_model(recipe.model)
    initialise(model, recipe.run.seed)
    run.prepare(model)
    optimizer = run.prepare(build_optimizer(run.module.parameters(), recipe.optim, lr=recipe.optim.lr))
    loader = Loader(RankStream(dataset, seed=5, batch=BATCH, coordinate=run.coordinate, degree=run.degree), workers=0)
    losses, norms = [], []
    for batch in run.batches(loader):
        factor = lr_factor("cosine", (run.steps_done + 1) / STEPS, warmup=2 / STEPS, final=0.1)
        set_lr(optimizer, factor)
        losses.append(float(run.step(batch)))
        assert run.report is not None
        norms.append(float(run.report.grad_norm))
        if run.steps_done == STEPS:
            break
    loader.close()
    return losses, norms, {name: value.detach().clone() for name, value in run.module.named_parameters()}


def train_plainly(recipe: Recipe) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same in plain torch: the whole batch in one forward, the mean over the labels that count."""
    dataset, _ = open_datasets(recipe.data, recipe.run.seed)
    model = build_model(recipe.model)
    initialise(model, recipe.run.seed)
    model.double()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    losses, norms = [], []
    for step in range(STEPS):
        batch = dataset.batch(sample_ids(5, len(dataset), step * BATCH, BATCH))
        labels = batch.pop("labels")
        loss = F.cross_entropy(model(**batch).flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.7)))
        done = (step + 1) / STEPS
        warm = 2 / STEPS
        cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * (done - warm) / (1 - warm))) / 2
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (done / warm if done < warm else cosine)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("documents", [wide(False), True], ids=["full", "ragged"])
@pytest.mark.parametrize("world_size", [wide(1), 2, 4])
def test_any_number_of_ranks_computes_what_plain_torch_does(pool: Pool, world_size: int, documents: bool) -> None:
    """1 rank accumulates 4 microbatches, 2 ranks 2, 4 ranks 1."""
    settings = recipe(mask_documents=documents)
    if documents:  # ragged indeed: the labels that count differ from one microbatch to the next
        dataset, _ = open_datasets(settings.data, 5)
        counts = [int((dataset.batch(np.arange(i, i + 2))["labels"] != -100).sum()) for i in range(0, 400, 2)]
        assert len(set(counts)) > 1
    losses, norms, weights = train_plainly(settings)
    for rank, (ours, our_norms, our_weights) in enumerate(pool.run(train_with_shoal, world_size, settings)):
        assert ours == pytest.approx(losses, rel=1e-12), f"rank {rank}"
        assert our_norms == pytest.approx(norms, rel=1e-12), f"rank {rank}"
        assert our_weights.keys() == weights.keys()
        for name, weight in weights.items():
            worst = ((our_weights[name] - weight).norm() / weight.norm()).item()
            assert worst < 1e-12, f"rank {rank}, {name}: relative difference {worst:.1e}"


def hardly_any_labels(world: World) -> list[float]:
    """One label counts on the first rank, none on the others."""
    run = Run("fp64 mb=1", world=world)
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    labels = torch.full((2,), -100)
    if world.rank == 0:
        labels[1] = 2
    inputs = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 0.0]], dtype=torch.float64)
    run.step((inputs, labels))
    return [value for parameter in run.module.parameters() for value in parameter.detach().flatten().tolist()]


def test_a_rank_without_a_label_still_takes_the_same_step(pool: Pool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    model(torch.tensor([[0.5, -1.0, 0.0]], dtype=torch.float64)).log_softmax(-1)[0, 2].neg().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    expected = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    for values in pool.run(hardly_any_labels, 2):
        assert values == pytest.approx(expected, rel=1e-13)


def overflow(world: World) -> tuple[list[float], list[bool], float]:
    """One rank's microbatch overflows in fp16; the decision must be everyone's."""
    run = Run("fp16", world=world, loss_scale=2.0**16, loss_scale_window=100)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 4))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    skipped = []
    for step in range(3):
        inputs = torch.ones(2, 3) * (1e3 if world.rank == 1 and step == 1 else 1.0)
        run.step((inputs, torch.tensor([0, 1])))
        assert run.report is not None
        skipped.append(run.report.was_skipped)
    return [float(p.detach().sum()) for p in run.module.parameters()], skipped, run.loss_scale.scale


def test_an_fp16_overflow_on_one_rank_is_a_decision_of_all(pool: Pool) -> None:
    results = pool.run(overflow, 2)
    assert results[0] == results[1]
    assert results[0][1] == [False, True, False]
    assert results[0][2] == 2.0**15
    assert all(math.isfinite(value) for value in results[0][0])


def nan_on_rank_one(world: World) -> str:
    run = Run("fp64 mb=1", world=world)
    model = nn.Linear(3, 4)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.ones(4, 3, dtype=torch.float64)
    if world.rank == 1:
        inputs[2] = torch.nan
    with pytest.raises(ValueError, match="not finite") as caught:
        run.step((inputs, torch.zeros(4, dtype=torch.long)))
    return str(caught.value)


def test_nan_names_rank_and_microbatch_on_every_rank(pool: Pool) -> None:
    for text in pool.run(nan_on_rank_one, 2):
        assert "rank 1, microbatch 2" in text


def collectives_per_step(world: World, plan: str, bucket_mb: float | None = None) -> int:
    """All-reduces that one step makes, as the profiler of torch counts them."""
    run = Run(plan, world=world, bucket_mb=bucket_mb)
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    run.step(batch)  # the first backward also arranges the buckets
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:  # else torch 2.11 warns
        run.step(batch)
    return sum(event.count for event in profile.key_averages() if event.key == "gloo:all_reduce")


def test_gradients_are_synchronised_once_per_step(pool: Pool) -> None:
    """One for the number of labels, one for the loss, one for the only bucket of gradients; accumulation adds none."""
    for plan in ("fp64 mb=4", "fp64 mb=1"):
        assert pool.run(collectives_per_step, 2, plan) == [3, 3], plan


def test_the_bucket_size_decides_in_how_many_parts_gradients_travel(pool: Pool) -> None:
    """A weight of 240 bytes and a bias of 40, in buckets of 30 bytes and more: two instead of one."""
    assert pool.run(collectives_per_step, 2, "fp64", 30 / 2**20) == [4, 4]
