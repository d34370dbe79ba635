"""A profile on real ranks: its parts add to the step by another clock, and it names a cause that was put in."""

from __future__ import annotations

import itertools
import json
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shoal.blueprint.description import Description
from shoal.comm.profile.axis_overlap import AxisOverlap, AxisTime
from shoal.comm.profile.timer import current
from shoal.comm.world import World
from shoal.observe.profile.profile import Profile
from shoal.train.profile.profiler import Profiler
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import Pool, on_ranks
from tests.dist.test_compositions import batches, build, loss_of

PLANS = [  # ranks, plan, model, parts that it must have
    (2, "dp_replicate=2 mb=2", "llama", ["dp_replicate"]),
    (2, "zero=3 mb=2 recompute=full", "llama", ["dp_shard", "recompute"]),
    (2, "pp=2 1f1b mb=2", "llama", ["pp", "bubble"]),
    wide(2, "tp=2 mb=2", "llama", ["tp"]),
    wide(2, "cp=2 mb=2", "llama", ["cp"]),
    wide(2, "ep=2 zero=2 mb=2", "bias", ["ep", "dp_shard"]),
    wide(2, "dp_replicate=2 compress=int8 mb=2", "llama", ["dp_replicate"]),
    wide(4, "dp_replicate=2 zero=1 mb=2", "llama", ["dp_replicate", "dp_shard"]),
    wide(4, "tp=2 pp=2 zbv mb=2", "llama", ["tp", "pp", "bubble"]),
    wide(4, "cp=2 pp=2 1f1b mb=2", "llama", ["cp", "pp"]),
]


@pytest.mark.parametrize(("ranks", "plan", "kind", "expected"), PLANS)
def test_parts_add_to_the_step_by_another_clock(
    pool: Pool, ranks: int, plan: str, kind: str, expected: list[str]
) -> None:
    for found in pool.run(parts_and_clock, ranks, plan, kind):
        assert set(expected) <= {name.partition(".")[0] for name in found["names"]}
        for seconds, shortest, longest in found["steps"]:
            assert 0.995 * shortest <= seconds <= 1.005 * longest


def parts_and_clock(world: World, plan: str, kind: str) -> dict[str, Any]:
    """The sum of the parts of each step, and what another clock says at least and at most."""
    run = Run(plan, loss=loss_of, world=world)
    model = build(kind, 4)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    sent = world.rank // 2 if "dp_replicate=2" in plan and world.size > 2 else world.rank
    batch = {name: value[:4] if run.degree > 1 else value for name, value in batches(kind)[sent % 2].items()}
    before, after = [], []
    profiler = Profiler(run)
    profiler.start(then=lambda: after.append(time.perf_counter()))
    inner = run.after_update

    def stamped() -> None:
        before.append(time.perf_counter())
        inner()  # type: ignore[misc]

    run.after_update = stamped
    for _ in range(3):
        run.step(batch)
    found = profiler.finish().ranks[world.rank]
    assert current.timer is None
    limits = [(b1 - a0, a1 - b0) for (b0, a0), (b1, a1) in itertools.pairwise(zip(before, after, strict=True))]
    sums = [sum(step.values()) for step in found.steps]
    return {
        "names": [name for name, seconds in found.total.items() if seconds > 0],
        "steps": [(total, *limit) for total, limit in zip(sums, limits, strict=True)],
    }


# ---- causes that are put in ------------------------------------------------------------------------------------------


class Points(Dataset[Tensor]):
    """Samples that take a while to read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.ones(8)


class Sleepy(nn.Module):
    """A block that takes a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.linear = seconds, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return self.linear(x)


class Blocks(nn.Sequential):
    def describe(self) -> Description:
        return Description(blocks=tuple(str(number) for number in range(len(self))))


def profiled(
    world: World,
    plan: str,
    *,
    load: float = 0.0,
    block: float = 0.0,
    blocks: int = 2,
    between: Callable[[int], None] | None = None,
) -> Profile:
    """A profile of four steps."""
    run = Run(plan, loss=lambda model, x: model(x).square().mean(), world=world)
    model = Blocks(*[Sleepy(block) for _ in range(blocks)])
    loader = DataLoader(Points(load), batch_size=8)
    _, _, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
    with Profiler(run) as profiler:
        for number, batch in enumerate(itertools.islice(run.batches(loader), 5)):
            if between is not None:
                between(number)
            run.step(batch)
    return profiler.result


def named(kind: str, make: Callable[[float], Profile]) -> Profile:
    """The profile that has a verdict; on a busy machine, of a longer delay. All ranks have the same verdict."""
    for scale in (1.0, 6.0):
        found = make(scale)
        if found.verdict.kind == kind:
            break
    assert found.verdict.kind == kind, str(found)
    return found


@pytest.mark.alone
@on_ranks(2)
def test_a_slow_loader(world: World) -> None:
    found = named("data", lambda scale: profiled(world, "dp_replicate=2", load=0.02 * scale))
    assert "num_workers" in found.verdict.next
    assert [(rank.record.messages, rank.record.bytes > 0) for rank in found.ranks] == [(1, True)] * 2


@pytest.mark.alone
@on_ranks(2)
def test_a_slow_rank(world: World) -> None:
    def make(scale: float) -> Profile:
        return profiled(world, "dp_replicate=2", between=lambda _: time.sleep(0.1 * scale * (world.rank == 1)))

    found = named("straggler", make)
    assert found.verdict.rank == 1
    assert "ms more in other" in found.verdict.evidence
    assert found.ranks[0].late_for[1] > 2 * found.ranks[1].late_for.get(0, 0.0)


@pytest.mark.alone
@on_ranks(2)
def test_a_slow_link(world: World, tmp_path: Path) -> None:
    """Every collective ends a while after both ranks have entered: as on a slow link. A step has four over all ranks,
    and three for each block that is sharded: with two blocks, either could be the larger part of a busy machine."""
    wait, call = vars(dist.Work)["wait"], dist.Work.wait

    def make(scale: float) -> Profile:
        over: weakref.WeakSet[Any] = weakref.WeakSet()

        def slow(work: Any, *arguments: Any) -> Any:
            done = call(work, *arguments)
            if work not in over:  # a second wait for the same collective finds it ended
                time.sleep(0.02 * scale)
            over.add(work)
            return done

        dist.Work.wait = slow  # type: ignore[method-assign]
        try:
            return profiled(world, "zero=3", blocks=4)
        finally:
            dist.Work.wait = wait  # type: ignore[method-assign]

    found = named("link", make)
    assert found.verdict.axis == "dp_shard"
    if not world.is_main:
        return
    found.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0 (dp_shard 0)", "rank 1 (dp_shard 1)"}
    assert any(event["name"] == "wait dp_shard" and event["dur"] > 2e4 for event in events if event["ph"] == "X")


@pytest.mark.alone
@on_ranks(2)
def test_recomputed_blocks(world: World) -> None:
    found = named("recompute", lambda scale: profiled(world, "dp_replicate=2 recompute=full", block=0.02 * scale))
    assert found.parts["recompute"] == pytest.approx(found.parts["forward"], rel=0.5)


@pytest.mark.alone
@on_ranks(2)
def test_a_pipeline_with_one_microbatch(world: World) -> None:
    """Each of two stages waits while the other one computes."""
    found = named("bubble", lambda scale: profiled(world, "pp=2 1f1b mb=8", block=0.03 * scale))
    assert found.verdict.cost > 0.25


@pytest.mark.alone
@on_ranks(2)
def test_one_slow_step(world: World) -> None:
    def make(scale: float) -> Profile:
        return profiled(world, "dp_replicate=2", between=lambda number: time.sleep(0.5 * scale * (number == 3)))

    named("jitter", make)


# ---- overlap ---------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@on_ranks(2)
def test_the_hidden_part_of_communication_is_timed_by_axis(world: World) -> None:
    """A collective that ends during computation is hidden, one that is waited for is not, and a step has its axes."""
    group = dist.new_group(group_desc="tp")
    many = torch.ones(8)

    def timed(seconds: float) -> AxisTime:
        """Rank 1 is half a second late, so that the collective of rank 0 takes as long."""
        overlap = AxisOverlap(is_on=True)
        dist.barrier(group)
        with overlap.step(0):
            time.sleep(0.5 * world.rank)
            work = dist.all_reduce(many, group=group, async_op=True)
            time.sleep(seconds)
            work.wait()
        assert overlap.last is not None
        assert current.timer is None
        return overlap.last["tp"]

    beside, exposed = timed(1.5), timed(0.0)
    if world.is_main:
        assert beside.hidden > 0.9
        assert 0.4 < beside.seconds < 1.4  # it is over long before it is waited for
        assert exposed.hidden < 0.1
    with (overlap := AxisOverlap(is_on=True)).step(3):  # not the first, and no tenth
        pass
    assert overlap.last is None

    run = Run("zero=3 mb=2", loss=loss_of, world=world)
    model = build("llama", 4)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    with overlap.step(9):
        run.step({name: value[:4] for name, value in batches("llama")[world.rank].items()})
    assert overlap.last is not None
    assert overlap.last["dp_shard"].seconds >= overlap.last["dp_shard"].exposed > 0
    dist.destroy_process_group(group)
