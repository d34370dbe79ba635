"""`loss_mean="microbatch"`: the mean of the means of microbatches and ranks, on every layout, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.comm.world import World
from shoal.train.run import Run
from tests.dist.pool import Pool

RANKS, MB, BATCH = 2, 2, 8


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def batch() -> tuple[Tensor, Tensor]:
    """Eight samples. Of the microbatches of two, other numbers of labels count."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 5, (BATCH,), generator=generator)
    y[torch.tensor([1, 5])] = -100
    return torch.randn(BATCH, 4, generator=generator, dtype=torch.float64), y


def pair(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum", ignore_index=-100), (y != -100).sum()


def root(model: nn.Module, batch: Any) -> Tensor:
    """No mean at all, which the global mean rejects."""
    x, y = batch
    return F.cross_entropy(model(x), y, ignore_index=-100).sqrt()


LOSSES: dict[str, Any] = {"none": None, "pair": pair, "root": root}


def by_hand(kind: str, mean: str) -> dict[str, Tensor]:
    model, (x, y) = build(), batch()
    parts = [(x[i : i + MB], y[i : i + MB]) for i in range(0, BATCH, MB)]
    means = [F.cross_entropy(model(a), b, ignore_index=-100) for a, b in parts]
    means = [one.sqrt() for one in means] if kind == "root" else means
    loss = torch.stack(means).mean() if mean == "microbatch" else F.cross_entropy(model(x), y, ignore_index=-100)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def on_rank(world: World, plan: str, kind: str, mean: Any) -> dict[str, Tensor]:
    run = Run(f"fp64 mb={MB} {plan}", world=world, loss=LOSSES[kind], loss_mean=mean)
    model = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x, y = batch()
    share = BATCH // run.degree
    own = slice(run.coordinate * share, (run.coordinate + 1) * share)
    loss = run.step((x[own], y[own]))
    after = run.weights()
    return {"loss": loss.detach(), **{name: before[name] - after[name] for name in after}}


@pytest.mark.parametrize("plan", ["dp_replicate=2", "zero=3", "pp=2"])
@pytest.mark.parametrize("kind", LOSSES)
def test_every_microbatch_counts_the_same(pool: Pool, plan: str, kind: str) -> None:
    found = pool.run(on_rank, RANKS, plan, kind, "microbatch")[0]
    expected = by_hand(kind, "microbatch")
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_default_counts_every_label_the_same(pool: Pool) -> None:
    found, expected = pool.run(on_rank, RANKS, "dp_replicate=2", "none", "global")[0], by_hand("none", "global")
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-12, atol=0.0)
    assert abs(expected["loss"] - by_hand("none", "microbatch")["loss"]) > 1e-3
