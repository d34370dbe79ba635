"""Weights in bfloat16 over two ranks: replicas stay equal bit by bit, and shards learn what one process does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.config.recipe import OptimSection
from shoal.numerics.local_tensor import to_local
from shoal.numerics.optim.build import build_optimizer
from shoal.train.run import Run
from tests.dist.pool import Pool


def go(world: World, plan: str) -> tuple[list[float], dict[str, Tensor], set[torch.dtype]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5))
    run = Run(f"bf16 {plan}", clip=1.0, param_dtype="bf16", world=world)
    run.prepare(model)
    section = OptimSection(param_dtype="bf16", state_dtype="bf16")
    run.prepare(build_optimizer(run.parameters, section, lr=3e-3))
    generator = torch.Generator().manual_seed(1)
    share = slice(world.rank * 32 // world.size, (world.rank + 1) * 32 // world.size)
    losses = []
    for _ in range(20):
        inputs = torch.randn(32, 6, generator=generator)
        losses.append(float(run.step((inputs[share], inputs[share, :5].argmax(-1)))))
    return (
        losses,
        {name: to_local(p).detach().clone() for name, p in run.composed.named.items()},
        {p.dtype for p in run.parameters},
    )


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2 zero=2", "dp_shard=2 zero=3"])
def test_two_ranks_learn_as_one(pool: Pool, plan: str) -> None:
    (alone, _, _), *_ = pool.run(go, 1, "")
    (losses, first, kinds), (others, second, _) = pool.run(go, 2, plan)
    assert losses == others
    assert kinds == {torch.bfloat16}
    assert alone[-1] < 0.9 * alone[0]
    assert losses == pytest.approx(alone, rel=0.03)  # gradients are rounded before they meet
    if "replicate" in plan:
        assert all(torch.equal(weight, second[name]) for name, weight in first.items())
