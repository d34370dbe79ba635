"""No pickle travels between ranks: whoever sends one to a rank runs code on it. While a run lives, from its first group
to its last checkpoint, every object collective of torch and every unpickling raise."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shoal.comm.all_or_none import all_or_none
from shoal.comm.collectives import all_gather
from shoal.comm.world import World
from shoal.errors import Problem, RunFailed, ShoalError
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import on_ranks
from tests.dist.test_checkpoint import build, share

OBJECT_COLLECTIVES = [name for name in distributed_c10d.__all__ if "object" in name]
PICKLING = ["load", "loads", "dump", "dumps", "Unpickler", "Pickler", "_loads", "_load"]
ON_TWO = [
    *(("llama", plan) for plan in ("dp_replicate=2 compress=int8", "zero=3", "tp=2", "cp=2")),
    *(("moe", plan) for plan in ("ep=2 zero=1", "pp=2 1f1b mb=2")),
    # `make test-all`:
    *(("llama", plan) for plan in ("dp_replicate=2", "zero=1", "cp=2 ulysses")),
    *(("moe", plan) for plan in ("ep=2 zero=3", "tp=2")),
    *(("llama", f"pp=2 {word} mb=2") for word in ("gpipe", "interleaved", "looped", "zb", "zbv", "dualpipev")),
    *(("llama", f"dp_replicate=2 {words}") for words in ("sync=local:2", "sync=diloco:2")),
]
ON_FOUR = [("moe", "pp=2 ep=2 zero=2 1f1b mb=2"), ("llama", "dp_replicate=2 dp_shard=2 zero=3")]


@contextlib.contextmanager
def no_pickles() -> Iterator[None]:
    """Let everything raise that makes a pickle or loads one."""
    places = [(module, name) for module in (dist, distributed_c10d) for name in OBJECT_COLLECTIVES]
    places += [
        (distributed_c10d, name) for name in ("_pickler", "_unpickler", "_object_to_tensor", "_tensor_to_object")
    ]
    places += [(pickle, name) for name in PICKLING]
    with pytest.MonkeyPatch.context() as patch:
        for module, name in places:
            patch.setattr(module, name, raising(name))
        yield


def raising(name: str) -> Any:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError(f"{name} was called, and pickles must not travel between ranks")

    return refuse


def live(world: World, kind: str, plan: str, folder: Path) -> None:
    """A run from its start to its end: steps, evaluations, weights, a checkpoint, and the step after it."""
    run = Run(f"fp64 {plan}", world=world, seed=0, clip=0.5)
    run.prepare(build(kind))
    run.prepare(torch.optim.AdamW(run.parameters, lr=1e-2))
    for step in range(2):
        run.step(share(run, step))
    held_out = [share(run, 9)] * (run.coordinate + 1)  # ranks that have more batches than others
    assert run.evaluate(held_out) > 0
    run.weights()
    run.save(folder)
    assert run.load(folder) == 2
    run.step(share(run, 2))
    run.composed.close()


@on_ranks(2)
@pytest.mark.parametrize("first", [0, *map(wide, range(6, len(ON_TWO), 6))])
def test_runs_on_two_ranks(world: World, tmp_path: Path, first: int) -> None:
    with no_pickles():
        for kind, plan in ON_TWO[first : first + 6]:
            live(world, kind, plan, tmp_path / plan.replace(" ", "-"))


@pytest.mark.wide
@on_ranks(4)
def test_runs_on_four_ranks(world: World, tmp_path: Path) -> None:
    with no_pickles():
        for kind, plan in ON_FOUR:
            live(world, kind, plan, tmp_path / plan.replace(" ", "-"))


def test_the_list_of_object_collectives_is_of_this_torch() -> None:
    assert {"all_gather_object", "gather_object", "broadcast_object_list", "send_object_list"} <= set(
        OBJECT_COLLECTIVES
    )


class Named(NamedTuple):
    x: int


@on_ranks(2)
def test_a_value_that_cannot_be_sent_raises_on_every_rank(world: World) -> None:
    with pytest.raises(ShoalError, match=r"rank 1 of a group has a value that cannot be sent to the others: .*Named"):
        world.all_gather_object(Named(1) if world.rank else {"x": 1})
    assert world.all_gather_object(world.rank) == [0, 1]


@on_ranks(2)
def test_an_error_arrives_as_what_it_is(world: World) -> None:
    def act() -> None:
        if world.rank == 1:
            error = RunFailed(Problem("C010", "a disk is full", "make room"), title="what happened")
            error.may_pass = True
            raise error

    with pytest.raises(RunFailed, match="a disk is full") as caught:
        all_or_none(world, act, failed="x", fix="y")
    assert caught.value.codes == ("C010",)
    assert (caught.value.problems[0].fix, caught.value.title, caught.value.may_pass) == (
        "make room",
        "what happened",
        True,
    )


@on_ranks(2)
def test_data_that_is_not_plain_is_rejected(world: World) -> None:
    """Rank 1 sends a pickle in place of its value."""
    if world.rank == 0:
        with pytest.raises(RunFailed, match="rank 1 of a group sent malformed data"):
            world.all_gather_object(0)
        return
    data = b"\1" + pickle.dumps("a pickle")
    sizes = all_gather(torch.tensor([len(data)]), 0, world.control_group)
    padded = torch.zeros(1, int(sizes.max()), dtype=torch.uint8)
    padded[0, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    all_gather(padded, 0, world.control_group)
