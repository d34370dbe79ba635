"""Saving while training goes on: what is written is the step that it says, and nothing grows."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.blueprint.faults import VARIABLE
from shoal.comm.world import World
from shoal.errors import RunFailed, ShoalError
from shoal.numerics.init import initialise
from shoal.train.run import Run
from tests.dist.pool import Pool, on_ranks
from tests.dist.test_reshard import assert_same, build, share, whole


def started(world: World, plan: str = "zero=3 mb=12", num_layers: int = 2) -> Run:
    model = build("llama", num_layers)
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
        run.wait_for_save(later)
        return held, time.perf_counter() - began
    finally:
        del os.environ[VARIABLE]


@pytest.mark.alone
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
        run.wait_for_save(tmp_path / "here")
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
            run.wait_for_save(tmp_path / "here")
    finally:
        os.environ.pop(VARIABLE, None)
    run.step(share(run, 2))


@pytest.mark.wide
@on_ranks(1)
def test_fifty_saves_take_no_more_memory_than_ten(world: World, tmp_path: Path) -> None:
    run = started(world, "mb=24", num_layers=4)  # 40 times its state are twice the bound
    sizes = []
    for step in range(50):
        run.step(share(run, step))
        run.save(tmp_path / "here", wait=False, keep=2)
        sizes.append(resident())
    run.wait_for_save(tmp_path / "here")
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


# ---- what a run of one's own may do ----------------------------------------------------------------------------------


class Counting(torch.nn.Module):
    """A model with a parameter that is one number, and a buffer that it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += x.detach().double().sum(0)  # type: ignore[operator]
        return self.linear(x) * self.scale  # type: ignore[no-any-return]


def own(world: World, plan: str = "fp64", kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **more: Any) -> Run:
    torch.manual_seed(0)
    model = Counting()
    run = Run(plan, world=world, **{"seed": 3, **more})
    run.prepare(model, kind(model.parameters(), lr=0.1))  # type: ignore[call-arg]
    return run


def one_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, generator=generator), torch.randint(2, (4,), generator=generator)


@on_ranks(1)
def test_numbers_buffers_rates_and_extras_come_back(world: World, tmp_path: Path) -> None:
    def train(run: Run, schedule: Any, steps: range) -> list[str]:
        told = []
        for step in steps:
            told.append(float(run.step(one_batch(step))).hex())
            schedule.step()
        return told

    def decay(run: Run) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.7)

    whole = own(world)
    expected = train(whole, decay(whole), range(6))
    first = own(world)
    schedule = decay(first)
    told = train(first, schedule, range(3))
    first.save(tmp_path / "here", extra={"schedule": schedule.state_dict(), "note": "mine"})
    again = own(world)
    schedule = decay(again)
    assert again.load(tmp_path / "here") == 3
    assert again.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"]
    schedule.load_state_dict(again.extra["schedule"])
    assert again.extra["note"] == "mine"
    assert told + train(again, schedule, range(3, 6)) == expected
    assert torch.equal(again.module.seen, whole.module.seen)  # type: ignore[arg-type]


@on_ranks(1)
def test_another_run_is_refused_unless_its_weights_are_all_that_is_wanted(world: World, tmp_path: Path) -> None:
    run = own(world)
    run.step(one_batch(0))
    run.save(tmp_path / "here")
    for other, what in (
        (own(world, seed=4), "seed was 3, and is 4"),
        (own(world, "fp32"), "precision was fp64, and is fp32"),
        (own(world, kind=torch.optim.SGD), "optimizer was AdamW, and is SGD"),
    ):
        with pytest.raises(ShoalError, match=what):
            other.load(tmp_path / "here")
    fresh = own(world, "fp32", torch.optim.SGD, seed=9)
    assert fresh.load(tmp_path / "here" / "step-00000001", only_weights=True) == 0
    torch.testing.assert_close(fresh.module.linear.weight, run.module.linear.weight.float())  # type: ignore[union-attr, arg-type]
    with pytest.raises(ShoalError, match="has to be numbers"):
        run.save(tmp_path / "here", extra={"x": object()})
    run.backward(run.module(one_batch(1)[0].double()).sum())
    with pytest.raises(ShoalError, match="in the middle of a step"):
        run.save(tmp_path / "here")


@on_ranks(1)
def test_states_of_another_shape_than_their_parameter(world: World, tmp_path: Path) -> None:
    """A whole tensor's are saved as they are."""
    run = own(world, "fp32", torch.optim.Adafactor)
    run.step(one_batch(0))
    run.save(tmp_path / "here")
    again = own(world, "fp32", torch.optim.Adafactor)
    assert again.load(tmp_path / "here") == 1
    assert float(again.step(one_batch(1))) == float(run.step(one_batch(1)))


@on_ranks(2)
def test_another_loader_is_refused_and_a_late_one_goes_on(world: World, tmp_path: Path) -> None:
    def loader(size: int) -> torch.utils.data.DataLoader[Any]:
        data = torch.utils.data.TensorDataset(torch.arange(24).double()[:, None].expand(24, 3), torch.zeros(24).long())
        return torch.utils.data.DataLoader(data, batch_size=size)

    run = own(world)
    dealt = run.prepare(loader(6))
    taken = []
    for batch in run.batches(dealt):
        with pytest.raises(ShoalError, match="would lose its samples"):
            run.save(tmp_path / "here")
        taken.append(batch[0][:, 0].tolist())
        run.step(batch)
        if len(taken) == 2:
            break
    run.save(tmp_path / "here")
    other = own(world)
    other.prepare(loader(4))
    with pytest.raises(ShoalError, match="batch_size was 6, and is 4"):
        other.load(tmp_path / "here")
    late = own(world)
    late.load(tmp_path / "here")
    rest = [batch[0][:, 0].tolist() for batch in late.batches(late.prepare(loader(6)))]
    assert sorted(itertools.chain(*taken, *rest)) == [x for x in range(24) if x % 6 // 3 == world.rank]


@on_ranks(1)
def test_an_object_store_gives_back_what_it_got(world: World) -> None:
    run = own(world)
    run.step(one_batch(0))
    run.save("memory://tests/own")
    again = own(world)
    assert again.load("memory://tests/own") == 1
    assert torch.equal(again.module.linear.weight, run.module.linear.weight)  # type: ignore[union-attr, arg-type]


@on_ranks(1)
def test_a_damaged_step_leaves_nothing_to_the_one_before_it(world: World, tmp_path: Path) -> None:
    """The one before it has no states of the optimizer: it begins without any."""
    run = own(world)
    run.save(tmp_path / "here")
    run.step(one_batch(0))
    run.save(tmp_path / "here")
    path = tmp_path / "here" / "step-00000001" / "shard-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    again = own(world)
    assert again.load(tmp_path / "here") == 0
    assert not again.optimizer.state
