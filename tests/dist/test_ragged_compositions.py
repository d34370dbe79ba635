"""The loss law, routing statistics and skipped steps under context and expert parallelism, where ranks have unlike
numbers of samples: batches that do not divide, microbatches that stand in for none, an overflow on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from shoal.comm.world import World
from shoal.numerics.init import initialise
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.compositions import num_layers_for
from tests.dist.pool import Pool
from tests.dist.test_compositions import batches, biases, build, gates, loss_of

SAMPLES, BATCH = 13, 5
"""Batches of 5, 5 and 3 samples: over two ranks 3 + 2 and 2 + 1, in microbatches of one or two."""
PLANS = [
    wide(2, "cp=2 mb=2", "moe"),
    (2, "dp_replicate=2 mb=1", "moe"),
    (2, "ep=2 zero=1 mb=2", "bias"),
    wide(2, "ep=2 zero=3 mb=1 recompute=full", "moe"),
    (4, "cp=2 ep=4 dp_shard=2 zero=2 mb=1", "moe"),
    (4, "pp=2 dp_replicate=2 1f1b mb=1 recompute=full", "moe"),
    (2, "pp=2 1f1b mb=2", "moe"),  # the last microbatch of every batch is shorter
    wide(2, "pp=2 gpipe mb=4", "moe"),
    wide(2, "pp=2 zbv mb=2", "bias"),
    wide(4, "pp=2 tp=2 sp=on 1f1b mb=2", "bias"),
    wide(4, "pp=4 1f1b mb=1", "moe"),  # the last batch has fewer microbatches than stages
    (2, "pp=2 dualpipev mb=1", "bias"),  # which needs four, and the last batch has three
    wide(4, "tp=2 dp_replicate=2 mb=1", "bias"),
]


def samples(kind: str) -> list[dict[str, Tensor]]:
    every = batches(kind)
    joined = {name: torch.cat([batch[name] for batch in every]) for name in every[0]}
    return [{name: tensor[i] for name, tensor in joined.items()} for i in range(SAMPLES)]


def train_plainly(kind: str, num_layers: int) -> dict[str, Any]:
    model = build(kind, num_layers)
    initialise(model, 7)
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, auxiliary, loads = [], [], []
    for batch in DataLoader(samples(kind), batch_size=BATCH):
        loss = loss_of(model, batch)
        extra = [gate.auxiliary_loss for gate in gates(model) if gate.auxiliary_loss is not None]
        sum(extra, loss).backward()  # type: ignore[union-attr]
        losses.append(loss.item())
        auxiliary.append(sum(one.item() for one in extra))
        loads.append(torch.stack([gate.load for gate in gates(model)]).double())
        optimizer.step()
        optimizer.zero_grad()
        for gate, load in zip(gates(model), loads[-1], strict=True):
            if gate.bias is not None:
                gate.bias += gate.bias_rate * (load.mean() - load).sign()
            gate.load = None
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"loss": losses, "auxiliary": auxiliary, "load": loads, "weight": weights, "bias": biases(model)}


def train_with_shoal(world: World, plan: str, kind: str) -> dict[str, Any]:
    run = Run(f"fp64 {plan}", seed=7, world=world)
    with torch.device("meta"):
        model = build(kind, num_layers_for(plan, world.size))
    loader = DataLoader(samples(kind), batch_size=BATCH)
    _, _, dealt = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3), loader)
    losses, auxiliary, loads = [], [], []
    for number, batch in enumerate(run.batches(dealt)):
        losses.append(run.step(batch).item())
        assert run.report is not None
        assert run.report.experts is not None
        size = min(BATCH, SAMPLES - number * BATCH)
        auxiliary.append(run.report.experts[:, -1].sum().item() / size)
        loads.append(run.report.experts[:, :-2].clone())
    own = {name: bias for part in run.composed.parts for name, bias in biases(part.model).items()}
    return {"loss": losses, "auxiliary": auxiliary, "load": loads, "weight": run.weights(), "bias": own}


@pytest.mark.parametrize(("size", "plan", "kind"), PLANS)
def test_unlike_shares_make_the_global_batch(pool: Pool, size: int, plan: str, kind: str) -> None:
    ranks, theirs = pool.run(train_with_shoal, size, plan, kind), train_plainly(kind, num_layers_for(plan, size))
    for ours in ranks:  # everything that is told is told alike to all
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        assert ours["auxiliary"] == pytest.approx(theirs["auxiliary"], rel=1e-12)
        assert all(torch.equal(mine, load) for mine, load in zip(ours["load"], theirs["load"], strict=True))
        assert all(torch.equal(bias, theirs["bias"][name]) for name, bias in ours["bias"].items())
    for name, weight in theirs["weight"].items():
        apart = (ranks[0]["weight"][name] - weight).abs().max() / weight.abs().max()
        assert apart < 1e-10, name


def overflow_on_one_rank(world: World, plan: str) -> tuple[list[bool], list[dict[str, Tensor]], float]:
    """The gradients of one rank are infinite in the second step."""
    run = Run(f"fp16 {plan}", seed=7, world=world, loss_scale=2.0**10)
    with torch.device("meta"):
        model = build("bias")
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    skipped, seen = [], []
    batch = batches("bias")[0]
    share = 8 // run.degree
    for step in range(3):
        if step == 1 and world.rank == world.size - 1:
            run.loss_scale.scale, before = 2.0**40, run.loss_scale.scale
        run.step({name: value[run.coordinate * share :][:share] for name, value in batch.items()})
        if step == 1 and world.rank == world.size - 1:
            run.loss_scale.scale = before / 2  # as the others', which have halved theirs
        assert run.report is not None
        skipped.append(run.report.was_skipped)
        seen.append({k: v for part in run.composed.parts for k, v in biases(part.model).items()})
    return skipped, seen, run.loss_scale.scale


@pytest.mark.parametrize("plan", [wide("cp=2"), wide("ep=2 zero=2"), "ep=2 zero=3 mb=2"])
def test_an_overflow_on_one_rank_is_a_decision_of_all(pool: Pool, plan: str) -> None:
    for skipped, seen, scale in pool.run(overflow_on_one_rank, 2, plan):
        assert skipped == [False, True, False]
        assert scale == 2.0**9
        for name, bias in seen[0].items():
            assert bias.any()
            assert torch.equal(bias, seen[1][name])  # a step that is not made moves no bias
            assert not torch.equal(bias, seen[2][name])
