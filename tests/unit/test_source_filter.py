"""The filter of a listening socket, run by the kernel on real connections of the loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from shoal.comm.rendezvous.source_filter import accept_only, program


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        yield server


def connects(listening: socket.socket, source: str) -> bool:
    """Whether a connection from an address is accepted, and carries more than fits into a packet."""
    try:
        with socket.create_connection(listening.getsockname(), timeout=0.3, source_address=(source, 0)) as near:
            far, _ = listening.accept()
            with far:
                near.sendall(bytes(100_000))
                num_left = 100_000
                while num_left:
                    num_left -= len(far.recv(num_left))
                far.sendall(b"x")
                return near.recv(1) == b"x"
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    ("networks", "accepted"),
    [
        (["127.0.0.1"], ["127.0.0.1"]),
        (["10.0.0.1", "127.0.0.2", "127.0.0.3"], ["127.0.0.2", "127.0.0.3"]),
        (["127.0.0.2/31"], ["127.0.0.2", "127.0.0.3"]),
        (["127.0.0.0/8"], ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.3.2.1"]),
        ([f"10.0.{number}.1" for number in range(200)] + ["127.3.2.1"], ["127.3.2.1"]),
        (["0.0.0.127", "1.0.0.127"], []),
    ],
)
def test_only_connections_from_some_networks_are_accepted(
    networks: list[str], accepted: list[str], listening: socket.socket
) -> None:
    sources = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.3.2.1"]
    assert [source for source in sources if connects(listening, source)] == sources
    accept_only(listening, networks)
    assert [source for source in sources if connects(listening, source)] == accepted


def test_a_filter_that_the_kernel_rejects_is_an_error_and_changes_nothing(listening: socket.socket) -> None:
    accept_only(listening, ["127.0.0.2"])
    with pytest.raises(OSError, match=r"Invalid argument"):
        accept_only(listening, [f"10.{number // 250}.{number % 250}.1" for number in range(1024)])  # 4097 instructions
    assert not connects(listening, "127.0.0.1")
    assert connects(listening, "127.0.0.2")


def test_the_program_loads_the_source_address_of_the_header() -> None:
    lines = [program(["10.0.0.0/8"])[at : at + 8].hex() for at in range(0, 40, 8)]
    assert lines == [
        "200000000c00f0ff",  # load 32 bits at SKF_NET_OFF + 12
        "54000000000000ff",  # and 255.0.0.0
        "150000010000000a",  # equal to 10.0.0.0: the next instruction, else the one after it
        "06000000ffffffff",  # keep the packet
        "0600000000000000",  # drop it
    ]
