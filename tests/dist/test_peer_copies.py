"""Hosts without a shared disk: each holds a copy of the shards of the host before it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.peers.fetch import Candidate, HeldStep, load_newest_of_hosts, transfers_to_load
from shoal.checkpoint.peers.host_ranks import HostRanks
from shoal.checkpoint.save import Snapshot, save
from shoal.checkpoint.storage.store import Store
from shoal.comm.world import World
from shoal.errors import RunFailed
from shoal.train.run import Run
from shoal.train.run_checkpoint import holder_of, state_of
from tests.dist.pool import on_ranks
from tests.dist.test_reshard import share
from tests.dist.test_saver import started

NAMES = [f"shard-{rank:05d}.safetensors" for rank in range(3)]


def values(run: Run) -> dict[str, torch.Tensor]:
    """This rank's parameters and states of the optimizer."""
    found = {}
    for number, parameter in enumerate(run.parameters):
        for name, value in {"": parameter, **run.optimizer.state[parameter]}.items():
            found[f"{number} {name}"] = getattr(value, "_local_tensor", value).detach().clone()
    return found


@on_ranks(3)
def test_a_lost_host_is_restored_from_the_copy_of_the_next_one(world: World, tmp_path: Path) -> None:
    hosts = HostRanks(((0,), (1,), (2,)), world.rank)
    store = Store(tmp_path / f"host{world.rank}")
    run = started(world, "zero=3 mb=8")
    for step in (1, 2):
        run.step(share(run, step))
        expected = values(run)
        save(store, world, Snapshot.of(holder_of(run), step=step, state=state_of(run)), hosts)
    own = {path.name for path in store.path(2).glob("*.safetensors")}
    assert own == {NAMES[world.rank], NAMES[world.rank - 1]}
    world.barrier()
    if world.rank == 1:
        shutil.rmtree(store.root)
    run.step(share(run, 3))
    said: list[str] = []
    manifest = load_newest_of_hosts([(store, hosts)], world, holder_of(run), said.append)
    assert manifest is not None
    assert (manifest.step, said) == (2, [])
    found = values(run)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    texts = world.all_gather_object((store.path(2) / "manifest.json").read_text())
    assert len(set(texts)) == 1
    held = world.all_gather_object(sorted(path.name for path in store.path(2).glob("*.safetensors")))
    assert all(sum(name in each for each in held) >= 2 for name in NAMES)  # another host may be lost now

    if world.rank == 1:  # lost again; and the copy of its shard is damaged
        shutil.rmtree(store.root)
    path = store.path(2) / NAMES[1]
    if world.rank != 1 and path.exists():
        flip_last_byte(path)
    world.barrier()
    manifest = load_newest_of_hosts([(store, hosts)], world, holder_of(run), said.append)
    assert manifest is not None
    assert manifest.step == 1
    assert "does not have the hash in its manifest" in said[0]

    if world.rank in (0, 2):  # two neighbours at once: more than this protects from
        shutil.rmtree(store.root)
    world.barrier()
    with pytest.raises(RunFailed, match="no host that is left has shard-00002"):
        load_newest_of_hosts([(store, hosts)], world, holder_of(run), said.append)


@on_ranks(2)
def test_a_damaged_file_is_replaced_by_the_copy_of_another_host(world: World, tmp_path: Path) -> None:
    hosts = HostRanks(((0,), (1,)), world.rank)
    store = Store(tmp_path / f"host{world.rank}")
    run = started(world, "zero=3 mb=8")
    for step in (1, 2):
        run.step(share(run, step))
        expected = values(run)
        save(store, world, Snapshot.of(holder_of(run), step=step, state=state_of(run)), hosts)
    damaged = store.path(2) / NAMES[0]
    if world.rank == 0:
        flip_last_byte(damaged)
    world.barrier()
    run.step(share(run, 3))
    said: list[str] = []
    manifest = load_newest_of_hosts([(store, hosts)], world, holder_of(run), said.append)
    assert manifest is not None
    assert manifest.step == 2
    assert "is damaged on one host, fetching files of another one" in said[0]
    found = values(run)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert load_newest_of_hosts([(store, hosts)], world, holder_of(run), said.append) == manifest
    assert len(said) == 1  # the good copy has taken the place of the damaged file
    for each in NAMES[:2]:  # on both hosts
        flip_last_byte(store.path(2) / each)
    world.barrier()
    older = load_newest_of_hosts([(store, hosts)], world, holder_of(run), said.append)
    assert older is not None
    assert older.step == 1


def flip_last_byte(path: Path) -> None:
    """A copy of the file: one that is linked elsewhere stays as it is."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_hosts_get_what_their_ranks_read_and_what_a_single_host_has() -> None:
    hosts = HostRanks(((0, 1), (2,), (3,)), rank=0)
    held = (HeldStep(0, 7, "m", ("a", "b"), ("c",)), HeldStep(0, 7, "m", ("b", "c"), ("a",)), None)
    found = transfers_to_load(Candidate(0, 7, "m", held), hosts, needs=[["a"], ["b"], ["a"], ["b"]])
    # a: only host 0 has it, and rank 2 reads it; b: rank 3 reads it; c: nobody reads it, and only host 1 has it
    assert [(each.file, each.source, each.target) for each in found] == [("a", 0, 2), ("b", 1, 3), ("c", 2, 3)]
