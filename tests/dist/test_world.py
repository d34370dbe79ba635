"""The world: how it starts, what it refuses, and that its exchanges are exact on one rank and on many."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.blueprint.layout import Layout
from shoal.comm.mesh import Mesh
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.rendezvous.session import Session
from shoal.comm.world import World, pick_device
from shoal.errors import RunFailed, ShoalError
from shoal.launch.local import launch
from tests.dist.pool import Pool, on_ranks

# ---- exchanges ------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 4, 8)
def test_host_reductions_are_exact_and_may_overlap(world: World) -> None:
    ranks = range(world.size)
    big = 2**40 + 1  # float32 would lose the 1
    total = world.all_reduce_host([big + world.rank, 0.5])
    largest = world.all_reduce_host([world.rank, -world.rank], "max")
    smallest = world.all_reduce_host([world.rank, -world.rank], "min")
    assert smallest.wait() == [0, -max(ranks)]
    assert largest.wait() == [max(ranks), 0]
    assert total.wait() == [sum(big + rank for rank in ranks), 0.5 * world.size]


@on_ranks(1, 4)
def test_objects_are_gathered_by_rank(world: World) -> None:
    assert world.all_gather_object({"rank": world.rank}) == [{"rank": rank} for rank in range(world.size)]
    assert world.is_main == (world.rank == 0)


@on_ranks(4)
def test_barrier_waits_for_the_last(world: World) -> None:
    if world.rank == 2:
        time.sleep(0.3)
    arrived = time.monotonic()
    world.barrier()
    left = time.monotonic()
    times = world.all_gather_object((arrived, left))
    assert min(left for _, left in times) >= max(arrived for arrived, _ in times)


def seconds_per_reduction(world: World) -> float:
    began = time.monotonic()
    for _ in range(200):
        world.all_reduce_host([1.0, 0.0]).wait()
    return (time.monotonic() - began) / 200


@pytest.mark.alone
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_host_reduction_is_cheap(world_size: int, pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    seconds = max(pool.run(seconds_per_reduction, world_size))
    with capsys.disabled():
        print(f"\n{world_size} ranks: {seconds * 1e6:.0f} µs per host reduction", end=" ")
    assert seconds < 0.01


# ---- start and end --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_group_that_is_there_is_adopted_and_left_alone(world: World) -> None:
    with World.start(None, device="cpu", threads=1) as second:
        assert (second.rank, second.size) == (world.rank, world.size)
        assert second.all_reduce_host([1.0]).wait() == [2.0]
    assert dist.is_initialized()
    world.barrier()
    place = Placement(rank=world.rank, world_size=3, local_rank=0, local_world_size=1, source="slurm")
    with pytest.raises(ShoalError, match=f"rank {world.rank} of 2, but slurm says rank {world.rank} of 3"):
        World.start(place, device="cpu")


@on_ranks(1, 2)
def test_device_of_cpu_workers(world: World) -> None:
    assert world.device == torch.device("cpu")
    assert torch.get_num_threads() == 1


def start_alone(place: Placement, store: dist.Store) -> tuple[Any, ...]:
    os.environ.update(MASTER_ADDR="nowhere.invalid", MASTER_PORT="1")  # not looked at
    os.environ.pop("OMP_NUM_THREADS", None)
    with World.start(None, device="cpu") as world:
        total = torch.ones(2)
        dist.all_reduce(total)
        facts = (world.rank, world.size, world.is_owner, torch.get_num_threads(), total.tolist())
    world.close()
    return (*facts, dist.is_initialized())


def test_one_rank_needs_no_address_and_takes_all_cores() -> None:
    assert launch(start_alone, nproc=1) == [(0, 1, True, len(os.sched_getaffinity(0)), [1.0, 1.0], False)]


def start_by_address(place: Placement, store: dist.Store, port: int) -> list[float]:
    with World.start(replace(place, master_addr="127.0.0.1", master_port=port), device="cpu", timeout=30) as world:
        return world.all_reduce_host([1.0]).wait()


def test_ranks_meet_at_an_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert launch(start_by_address, (port,), nproc=2) == [[2.0], [2.0]]


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with pytest.raises(ShoalError, match=rf"port {port} on this host is taken[^§]*fix: export MASTER_PORT="):
            launch(start_by_address, (port,), nproc=2)


def start_without_the_others(place: Placement, store: dist.Store, address: str | None) -> None:
    port = 1 if address else None
    lonely = Placement(rank=1, world_size=2, local_rank=0, local_world_size=1, master_addr=address, master_port=port)
    World.start(lonely, device="cpu", timeout=1)


def test_nobody_at_the_address() -> None:
    with pytest.raises(ShoalError, match=r"rank 1 of 2 could not connect to rank 0 at 127.0.0.1:1"):
        launch(start_without_the_others, ("127.0.0.1",), nproc=1)


def test_no_way_to_meet() -> None:
    with pytest.raises(ShoalError, match="2 ranks need a rendezvous"):
        launch(start_without_the_others, (None,), nproc=1)


def fail_inside(place: Placement, store: dist.Store) -> bool:
    with pytest.raises(KeyError), World.start(place, device="cpu", store=store, timeout=30):
        raise KeyError
    return dist.is_initialized()


@pytest.mark.parametrize(("nproc", "stays"), [(1, False), (2, True)])
def test_a_failing_rank_keeps_its_connections_until_it_has_told_why(nproc: int, stays: bool) -> None:
    assert launch(fail_inside, nproc=nproc) == [stays] * nproc


# ---- the device -----------------------------------------------------------------------------------------------------


def place_of(local_rank: int, local_size: int) -> Placement:
    return Placement(rank=local_rank, world_size=local_size, local_rank=local_rank, local_world_size=local_size)


@pytest.mark.parametrize(
    ("name", "num_cuda", "local_rank", "local_size", "backend", "expected"),
    [
        ("auto", 0, 1, 2, None, "cpu"),
        ("cpu", 8, 1, 2, None, "cpu"),
        ("auto", 8, 3, 8, None, "cuda:3"),
        ("cuda", 1, 0, 1, None, "cuda:0"),
        ("cuda", 1, 1, 2, "gloo", "cuda:0"),
    ],
)
def test_picked_device(
    name: str, num_cuda: int, local_rank: int, local_size: int, backend: str | None, expected: str
) -> None:
    picked = pick_device(name, place_of(local_rank, local_size), backend=backend, num_cuda=num_cuda)
    assert picked == torch.device(expected)


@pytest.mark.parametrize(
    ("name", "num_cuda", "text"),
    [
        ("cuda", 0, r"device is cuda, but this machine has no CUDA device \[N014\]\n    fix: device='cpu'"),
        ("cuda", 2, r"4 ranks on this machine, but 2 CUDA devices[^§]*fix: torchrun --nproc-per-node 2"),
        ("auto", 2, r"4 ranks on this machine, but 2 CUDA devices"),
        ("tpu", 2, r"device must be auto, cpu or cuda, got 'tpu' \[R049\]\n    fix: device='cpu'"),
    ],
)
def test_refused_device(name: str, num_cuda: int, text: str) -> None:
    with pytest.raises(ShoalError, match=text):
        pick_device(name, place_of(0, 4), backend=None, num_cuda=num_cuda)


# ---- who is at the other end ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_connection_that_a_stranger_has_taken_ends_the_run(world: World) -> None:
    Session(b"the key of both").new_group([0, 1], timeout=timedelta(seconds=20))
    group = dist.new_group([0, 1])
    with pytest.raises(RunFailed, match=f"the connection to rank {1 - world.rank} was taken by a process that is not"):
        Session(f"the key of {world.rank}".encode()).admit(group)


def groups_of_a_run(place: Placement, store: dist.Store) -> tuple[bool, int]:
    with World.start(place, device="cpu", store=store, timeout=30) as world:
        world.with_own_connections()
        Mesh.make(world, Layout(tp=2))
        assert world.session is not None
        return world.session.key != place.key, next(world.session._numbers)


def test_every_group_of_a_launch_is_checked() -> None:
    assert launch(groups_of_a_run, nproc=2) == [(True, 3), (True, 3)]  # of the world, of the saver, of tp
