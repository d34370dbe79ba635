"""The ranks of each host, and the ring in which hosts hold copies for each other.

    host 0 ──▶ host 1 ──▶ host 2 ──▶ host 0        each sends its shards to the next one

If all ranks share one store, they count as one host: its leader is rank 0, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from shoal.comm.all_or_none import all_or_none
from shoal.comm.world import World

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One file that one rank sends to another."""

    file: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class HostRanks:
    """The ranks that have one store each, seen from one of them."""

    groups: tuple[tuple[int, ...], ...]
    """The ranks of each host."""
    rank: int

    @classmethod
    def shared(cls, world: World) -> HostRanks:
        """All ranks use one store."""
        return cls((tuple(range(world.size)),), world.rank)

    @classmethod
    def of(cls, world: World) -> HostRanks:
        """Each host has a store of its own. Every rank calls it."""
        groups: list[list[int]] = []
        for rank, local_rank in enumerate(world.all_gather_object(world.local_rank)):
            if local_rank == 0:  # the ranks of a host follow each other
                groups.append([])
            groups[-1].append(rank)
        return cls(tuple(map(tuple, groups)), world.rank)

    @property
    def index(self) -> int:
        """The number of this rank's host."""
        return self.host_of(self.rank)

    @property
    def leader(self) -> int:
        """The rank that changes the store of this host."""
        return self.groups[self.index][0]

    @property
    def is_leader(self) -> bool:
        """Whether this rank changes the store of its host."""
        return self.rank == self.leader

    def host_of(self, rank: int) -> int:
        """The number of a rank's host."""
        return next(number for number, ranks in enumerate(self.groups) if rank in ranks)

    def next_host(self, host: int) -> int:
        """The host that holds copies for a host."""
        return (host + 1) % len(self.groups)

    def to_next_host(self, files: dict[int, str]) -> Iterator[Transfer]:
        """The transfers that give the file of each rank to the next host.

        >>> ring = HostRanks(((0, 1), (2,)), rank=0)
        >>> [(each.source, each.target) for each in ring.to_next_host({0: "a", 1: "b", 2: "c"})]
        [(0, 2), (1, 2), (2, 0)]
        """
        for rank, file in files.items():
            host = self.host_of(rank)
            partners = self.groups[self.next_host(host)]
            if len(self.groups) > 1:
                yield Transfer(file, rank, partners[self.groups[host].index(rank) % len(partners)])


def on_leaders(world: World, hosts: HostRanks, act: Callable[[], T], *, failed: str, fix: str = "") -> T:
    """Run an action on the leader of each host, and return its result there to all ranks of the host; if it fails on
    one, every rank raises."""
    values: list[Any] = all_or_none(world, lambda: act() if hosts.is_leader else None, failed=failed, fix=fix)
    return values[hosts.leader]  # type: ignore[no-any-return]
