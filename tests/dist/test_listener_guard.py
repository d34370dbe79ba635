"""The ports of gloo on two hosts (namespaces of the kernel), and a third host that tries to connect to them."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shoal.comm.rendezvous.authenticated_store import SealedStore
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.rendezvous.listener_guard import Peers, expect_peers, guard_listeners, guarding
from shoal.comm.rendezvous.own_sockets import open_sockets
from shoal.comm.world import World
from shoal.launch.local import launch
from tests.cli.host import enter_network
from tests.cli.test_hosts import hosts, stranger

__all__ = ["hosts", "stranger"]  # fixtures


def listening_ports() -> set[tuple[str, int]]:
    """The addresses at which this process listens."""
    found = set()
    for descriptor, _ in open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as each:
            if each.family == socket.AF_INET and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(each.getsockname())
    return found


def connects_from(network: str, address: tuple[str, int]) -> bool:
    """Whether a process in a network can connect to an address."""
    found: list[bool] = []

    def connect() -> None:
        enter_network(network)
        try:
            socket.create_connection(address, timeout=0.3).close()
            found.append(True)
        except TimeoutError:
            found.append(False)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join()
    return found[0]


class Watched(SealedStore):
    """A store, and a stranger who tries all ports of this process just before a value is published."""

    def __init__(self, store: dist.Store, stranger: str) -> None:
        super().__init__(store, b"the key of a session")
        self.stranger, self.tried = stranger, {}  # type: ignore[var-annotated]

    def set(self, key: str, value: str | bytes) -> None:
        inner, outer = self._store, self

        class Before:
            def set(self, key: str, value: str | bytes) -> None:
                outer.try_ports()
                inner.set(key, value)  # type: ignore[arg-type]

        self._store = Before()  # type: ignore[assignment]
        try:
            super().set(key, value)
        finally:
            self._store = inner

    def try_ports(self) -> None:
        for address in listening_ports() - set(self.tried):
            self.tried[address] = connects_from(self.stranger, address)


def groups_among_strangers(
    place: Placement, store: dist.Store, networks: list[str], addresses: list[str], is_known: bool
) -> dict[str, object]:
    enter_network(networks[place.rank])
    os.environ["GLOO_SOCKET_IFNAME"] = f"cable{place.rank}"
    peers = Peers(tuple(addresses), addresses[place.rank]) if is_known else None
    apart = replace(place, local_rank=0, local_world_size=1, node=place.rank, peers=peers)
    watched = Watched(store, networks[2])
    with World.start(apart, device="cpu", store=watched, timeout=30) as world:
        world.new_group([0, 1], timeout=timedelta(seconds=30))
        sums = torch.ones(3) * (world.rank + 1)
        dist.all_reduce(sums, group=world.control_group)
        later = {address: connects_from(networks[2], address) for address in listening_ports()}
        world.barrier()
        return {"sum": sums.tolist(), "first": list(watched.tried.items()), "later": list(later.items())}


@pytest.mark.parametrize("is_known", [True, False])
def test_no_other_host_connects_to_gloo_before_or_after_its_ports_are_published(
    hosts: list[tuple[str, str]], stranger: str, is_known: bool
) -> None:
    networks, addresses = [name for name, _ in hosts], [address for _, address in hosts]
    found = launch(groups_among_strangers, ([*networks, stranger], addresses, is_known), nproc=2)
    assert [each["sum"] for each in found] == [[3.0] * 3] * 2
    for tries in (found[0]["first"], found[0]["later"]):
        assert [address for (address, _), _ in tries] == [addresses[0]] * 2  # of two groups
        assert {connected for _, connected in tries} == {not is_known}


def on_one_host(place: Placement, store: dist.Store, networks: list[str], address: str) -> dict[str, object]:
    enter_network(networks[0])
    os.environ["GLOO_SOCKET_IFNAME"] = "cable0"
    with World.start(place, device="cpu", store=store, timeout=30) as world:
        world.barrier()
        tried = {each: connects_from(networks[1], each) for each in listening_ports() if each[0] == address}
        world.barrier()
        return {"tried": list(tried.values())}


def test_no_other_host_connects_to_the_ranks_of_one_host(hosts: list[tuple[str, str]], stranger: str) -> None:
    (first, address), _ = hosts
    assert launch(on_one_host, ([first, stranger], address), nproc=2) == [{"tried": [False]}] * 2


def early_connection(
    place: Placement, store: dist.Store, networks: list[str], own: str
) -> tuple[bytes | None, bool, str]:
    """What the stranger's connection reads (b"": it has ended; None: nothing), whether another one is accepted, and
    what is printed."""
    enter_network(networks[0])
    expect_peers(Peers(("10.77.0.2",), own=own), reports=True)
    near: list[socket.socket] = []

    def connect(address: tuple[str, int]) -> None:
        enter_network(networks[1])
        near.append(socket.create_connection(address, timeout=5))

    with socket_of_gloo() as listening, contextlib.redirect_stderr(io.StringIO()) as said:
        thread = threading.Thread(target=connect, args=(listening.getsockname(),))
        thread.start()
        thread.join()
        far, _ = listening.accept()
        guard_listeners()
        far.settimeout(0.3)
        read = None
        with contextlib.suppress(TimeoutError):
            read = far.recv(1)
        return read, connects_from(networks[1], listening.getsockname()), said.getvalue()


@contextlib.contextmanager
def socket_of_gloo() -> Iterator[socket.socket]:
    with guarding(open_sockets()), socket.create_server(("10.77.0.1", 0)) as listening:
        yield listening


def test_a_stranger_who_was_quicker_than_the_filter_is_cut_off(hosts: list[tuple[str, str]], stranger: str) -> None:
    found = launch(early_connection, ([hosts[0][0], stranger], "10.77.0.1"), nproc=1)
    assert found == [(b"", False, "")]


def test_a_port_at_an_address_that_was_not_checked_stays_open(hosts: list[tuple[str, str]], stranger: str) -> None:
    found = launch(early_connection, ([hosts[0][0], stranger], "10.77.0.77"), nproc=1)
    said = "shoal: every address may connect to ranks at 10.77.0.1: the hosts of the run have reached this one at"
    assert found == [(None, True, f"{said} 10.77.0.77\n")]
