"""Saving while training goes on: what is written is the step that it says, and nothing grows."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from shoal.blueprint.faults import VARIABLE
from shoal.comm.world import World
from shoal.errors import RunFailed
from shoal.numerics.init import initialise
from shoal.train.run import Run
from tests.dist.pool import Pool, on_ranks
from tests.dist.test_reshard import assert_same, build, share, whole


def started(world: World, plan: str = "zero=3 mb=6") -> Run:
    model = build("llama")
    initialise(model, 0)
    run = Run(f"fp64 {plan}", world=world, seed=0)
    run.prepare(model)
    run.prepare(torch.optim.AdamW(run.parameters, lr=1e-2))
    return run


def _save_beside_steps(world: World, now: str, later: str) -> tuple[float, float]:
    """One step saved at once, and the same step written slowly while three more are made."""
    run = started(world)
    run.step(share(run, 0))
    run.save(now)
    os.environ[VARIABLE] = "slow_disk_at=write:2,seconds:1"
    try:
        began = time.perf_counter()
        run.save(later, wait=False)
        held = time.perf_counter() - began
        for step in range(1, 4):
            run.step(share(run, step))
        run.saved(later)
        return held, time.perf_counter() - began
    finally:
        del os.environ[VARIABLE]


def test_what_is_written_is_the_step_that_was_copied(pool: Pool, tmp_path: Path) -> None:
    for held, seconds in pool.run(_save_beside_steps, 2, str(tmp_path / "now"), str(tmp_path / "later")):
        assert held < 0.5 < 1.0 < seconds
    assert_same(whole(tmp_path / "later"), whole(tmp_path / "now"))


@on_ranks(2)
def test_one_save_at_a_time(world: World, tmp_path: Path) -> None:
    run = started(world)
    run.step(share(run, 0))
    os.environ[VARIABLE] = "slow_disk_at=write:2,seconds:0.5"
    try:
        run.save(tmp_path / "here", wait=False)
        run.step(share(run, 1))
        began = time.perf_counter()
        run.save(tmp_path / "here", wait=False)  # waits for the one before
        assert time.perf_counter() - began > 0.3
        run.saved(tmp_path / "here")
        assert {path.name for path in (tmp_path / "here").glob("step-*")} == {"step-00000001", "step-00000002"}
    finally:
        del os.environ[VARIABLE]


@on_ranks(2)
def test_a_save_that_failed_is_raised_to_who_asks(world: World, tmp_path: Path) -> None:
    run = started(world)
    run.step(share(run, 0))
    if world.rank == 1:
        os.environ[VARIABLE] = "disk_full_at=write:1"
    try:
        run.save(tmp_path / "here", wait=False)
        run.step(share(run, 1))
        with pytest.raises(RunFailed, match=r"step 1 was not saved.*rank 1: No space left on device"):
            run.saved(tmp_path / "here")
    finally:
        os.environ.pop(VARIABLE, None)
    run.step(share(run, 2))


@on_ranks(1)
def test_fifty_saves_take_no_more_memory_than_ten(world: World, tmp_path: Path) -> None:
    run = started(world, "mb=6")
    sizes = []
    for step in range(50):
        run.step(share(run, step))
        run.save(tmp_path / "here", wait=False, keep=2)
        sizes.append(resident())
    run.saved(tmp_path / "here")
    assert max(sizes[10:]) - sizes[9] < 4 * 2**20
    assert len(list((tmp_path / "here").iterdir())) == 3  # two steps, and `latest`


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


@on_ranks(2)
def test_a_loader_of_ones_own_goes_on_where_it_stopped(world: World, tmp_path: Path) -> None:
    def loader() -> torch.utils.data.DataLoader[torch.Tensor]:
        data = torch.utils.data.TensorDataset(torch.arange(40).float()[:, None], torch.arange(40) % 3)
        return torch.utils.data.DataLoader(data, batch_size=6, shuffle=True)

    def seen(run: Run, dealt: torch.utils.data.DataLoader[torch.Tensor], most: int) -> list[list[float]]:
        found = []
        for batch in run.batches(dealt):
            found.append(batch[0].flatten().tolist())
            run.step(batch)
            if len(found) == most:
                break
        return found

    def fresh() -> tuple[Run, torch.utils.data.DataLoader[torch.Tensor]]:
        run = Run("dp_replicate=2", world=world, seed=3)
        model = torch.nn.Linear(1, 3)
        _, _, dealt = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), loader())
        return run, dealt

    run, dealt = fresh()
    whole_run = seen(run, dealt, 99) + seen(run, dealt, 99)  # two epochs of seven batches
    run, dealt = fresh()
    first = seen(run, dealt, 99) + seen(run, dealt, 3)
    run.save(tmp_path / "here")
    again, dealt = fresh()
    assert again.load(tmp_path / "here") == 10
    assert first + seen(again, dealt, 99) == whole_run
