"""A prepared `DataLoader` that would give other batches than the saved one is rejected, whenever it is prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shoal.comm.world import World
from shoal.errors import ShoalError
from tests.dist.pool import on_ranks
from tests.dist.test_saver import own

CHANGED = [
    (23, {}, "samples was 24, and is 23"),
    (24, {"shuffle": True}, "order was as numbered, and is shuffled"),
    (24, {"drop_last": True}, "drop_last was False, and is True"),
]


def loader_of(samples: int, **more: Any) -> DataLoader[Any]:
    values = torch.arange(samples).double()[:, None].expand(samples, 3)
    return DataLoader(TensorDataset(values, torch.zeros(samples).long()), **{"batch_size": 6, **more})


@on_ranks(2)
def test_a_changed_loader_is_rejected_before_and_after_load(world: World, tmp_path: Path) -> None:
    run = own(world)
    run.step(next(iter(run.batches(run.prepare(loader_of(24))))))
    run.save(tmp_path / "here")
    for samples, more, what in CHANGED:
        early = own(world)
        early.prepare(loader_of(samples, **more))
        with pytest.raises(ShoalError, match=what):
            early.load(tmp_path / "here")
        late = own(world)
        late.load(tmp_path / "here")
        with pytest.raises(ShoalError, match=what):
            late.prepare(loader_of(samples, **more))
        weights = own(world)
        weights.load(tmp_path / "here", only_weights=True)
        assert weights.prepare(loader_of(samples, **more)).position == (0, 0)
    same = own(world)
    same.load(tmp_path / "here")
    assert same.prepare(loader_of(24)).position == (0, 1)


@on_ranks(2)
def test_a_loader_that_is_not_prepared_is_rejected(world: World) -> None:
    """Each rank took whole batches of its own, and with shuffle=True some samples twice, without a word."""
    run = own(world)
    for more in ({}, {"shuffle": True}):
        with pytest.raises(ShoalError, match="this DataLoader is not prepared: each of 2 ranks"):
            next(iter(run.batches(loader_of(24, **more))))
    knowing = DistributedSampler(range(24), num_replicas=2, rank=world.rank, shuffle=False)  # type: ignore[arg-type, var-annotated]
    inputs, _ = next(iter(run.batches(loader_of(24, batch_size=3, sampler=knowing))))
    assert inputs[:, 0].tolist() == [world.rank, world.rank + 2, world.rank + 4]
