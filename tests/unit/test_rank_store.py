"""The store of ranks of several hosts: one generation's keys at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from shoal.launch.hosts.store.client import RankStore
from shoal.launch.hosts.store.process import StoreProcess
from shoal.launch.hosts.store.server import prefix_of, store_key

KEY = b"k" * 32


Rank = Callable[[int], RankStore]


@pytest.fixture
def process() -> Iterator[StoreProcess]:
    started = StoreProcess.start("127.0.0.1", 0, KEY)
    yield started
    started.close()


@pytest.fixture
def rank_of(process: StoreProcess) -> Iterator[Rank]:
    """The store as a rank of a generation sees it."""
    opened: list[RankStore] = []

    def open_one(generation: int) -> RankStore:
        opened.append(RankStore(process.address, store_key(KEY), prefix_of("job", generation), 5.0))
        return opened[-1]

    yield open_one
    for each in opened:
        each._channel.close()


def test_a_generation_begins_with_an_empty_store_and_ends_the_one_before(process: StoreProcess, rank_of: Rank) -> None:
    process.begin("job", 0)
    old, other = rank_of(0), rank_of(0)
    old.set("address", "here")
    assert (other.get("address"), old.num_keys()) == (b"here", 1)
    process.begin("job", 1)
    new = rank_of(1)
    assert (new.check(["address"]), new.add("count", 1), new.num_keys()) == (False, 1, 1)
    for act in (lambda: old.set("address", "there"), lambda: other.get("address")):
        with pytest.raises(dist.DistNetworkError, match="is lost"):
            act()
    process.begin("job", 0)  # as if it came back: what it had written is gone
    assert rank_of(0).num_keys() == 0
