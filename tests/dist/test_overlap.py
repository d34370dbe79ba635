"""How long gradients travel under DDP, and how much of that the backward hides."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from shoal.comm.world import World
from shoal.train.run import Run
from tests.dist.pool import on_ranks


@on_ranks(2)
def test_times_of_gradients_that_ddp_sends(world: World) -> None:
    """They come from timers of torch's reducer that are not public: this notices when a torch has others."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    run = Run("dp_replicate=2", loss=lambda m, x: m(x).square().mean(), world=world)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    seconds = []
    for step in range(42):  # torch by itself times the first ten steps, and then every hundredth
        run.step(torch.ones(8, 64))
        sent = run.report.overlap if run.report is not None else None
        assert (sent is not None) == (step in (0, 9, 19, 29, 39))
        if sent is None:
            continue
        assert 0 < sent.seconds < 5
        assert 0 <= sent.exposed <= sent.seconds
        assert sent.bytes == 4 * (64 * 64 + 64) * 4  # 2 (n - 1) / n of all gradients
        seconds.append(sent.seconds)
    assert len(set(seconds)) == len(seconds), "the timers stood still"


@pytest.mark.alone
@on_ranks(2)
def test_times_are_those_of_their_own_step(world: World) -> None:
    """A backward that is slow once is slow in the report of that step."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    run = Run("dp_replicate=2 mb=8", loss=lambda m, x: m(x).square().mean(), world=world)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    slow = {"step": False}
    model[0].weight.register_hook(lambda gradient: (time.sleep(0.2 * slow["step"]), gradient)[1])
    found = {}
    for step in range(32):
        slow["step"] = step == 19 and world.rank == 1
        run.step(torch.ones(8, 64))
        if run.report is not None and run.report.overlap is not None:
            found[step] = run.report.overlap.seconds
    slowest = max(found, key=found.__getitem__)
    assert sorted(found) == [0, 9, 19, 29]
    assert found[29] < 0.15
    if world.rank == 0:  # it waits for the other one's gradients
        assert slowest == 19
        assert found[19] > 0.15
