"""0.1: replicas drifted apart after a layer was unfrozen in the middle of a run.

DDP puts the parameters that need a gradient into buckets when it is built. One that began to need a gradient later had
that of its rank's samples, so each rank trained another model, without a word. FSDP2 reduces it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.comm.world import World
from shoal.errors import ShoalError
from shoal.train.run import Run
from tests.dist.pool import Pool


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    model[0].requires_grad_(False)
    return model


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 8, 5, generator=generator, dtype=torch.float64)
    return list(zip(inputs, torch.randint(3, (4, 8), generator=generator), strict=True))


def unfreeze_in_the_middle(world: World, plan: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    run, model = Run(f"fp64 {plan}", world=world), build()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    share = slice(run.coordinate * 8 // run.degree, (run.coordinate + 1) * 8 // run.degree)
    for step, (x, y) in enumerate(batches()):
        if step == 2:
            run.module[0].requires_grad_(True)
        try:
            run.step((x[share], y[share]))
        except ShoalError as error:
            return [f"{step} {problem}" for problem in error.problems], {}
    return [], run.weights()


@pytest.mark.parametrize("plan", ["zero=0 mb=2", "compress=int8"])
def test_a_layer_that_is_unfrozen_is_rejected_where_no_bucket_has_it(pool: Pool, plan: str) -> None:
    for found, _ in pool.run(unfreeze_in_the_middle, 2, plan):
        assert len(found) == 1
        assert found[0].startswith("2 0.weight needs a gradient")
        assert "T104" in found[0]


@pytest.mark.parametrize(("size", "plan"), [(1, ""), (2, "zero=3 mb=2")])
def test_it_trains_as_in_plain_torch_elsewhere(pool: Pool, size: int, plan: str) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(batches()):
        if step == 2:
            model[0].requires_grad_(True)  # type: ignore[index]
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, weights = pool.run(unfreeze_in_the_middle, size, plan)[0]
    assert not found
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-12, atol=1e-12)
