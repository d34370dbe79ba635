"""A stranger in the network of two hosts, at every open port during a run: nothing of it runs, and nobody stops."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.host import Host, enter_network, until
from tests.cli.test_hosts import hosts, stranger
from tests.cli.test_resume import WORDS, committed, saves
from tests.cli.test_train import losses, records

__all__ = ["hosts", "stranger"]  # fixtures

PORT = 29681
STEPS = 12


class Touch:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@contextlib.contextmanager
def in_network(name: str, act: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run a function in a thread that is in another network, until it is over."""
    is_over, errors = threading.Event(), []

    def call() -> None:
        try:
            enter_network(name)
            act(is_over)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert errors == []


def relay(listening: socket.socket, to: tuple[str, int], heard: bytearray, is_over: threading.Event) -> None:
    """Pass a connection on until an end closes it, and record what its client says: the handshake of an agent."""
    with contextlib.suppress(ConnectionError), listening.accept()[0] as client, socket.create_connection(to) as server:
        while not is_over.is_set():
            for source in select.select([client, server], [], [], 0.1)[0]:
                data = source.recv(2**16)
                if not data:
                    return
                if source is client:
                    heard += data
                (server if source is client else client).sendall(data)


def listening_ports(pid: int) -> set[tuple[str, int]]:
    """The addresses at which processes in the network of a process listen."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, port = local.partition(":")
            if state == "0A":
                text = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if name == "tcp" else address
                found.add((text, int(port, 16)))
    return found


def test_a_stranger_at_every_port_stops_nobody_and_runs_nothing(
    host: Host, hosts: list[tuple[str, str]], tmp_path: Path
) -> None:
    (first, here), (second, there) = hosts
    env = {"SHOAL_KEY": "a key for a test of strangers", "SHOAL_FAULTS": "kill_at=rank:1,step:6"}
    words = [*WORDS, "--run.dir", "run", "--checkpoint.every", "1step", "--run.duration", f"{STEPS}step"]
    meeting = ["--hosts", f"{here}:1,{there}:1", "--ssh", "none", "--listen", f"{here}:{PORT}"]
    started = host.start(*words, *meeting, cwd=tmp_path, env=env, network=first)
    heard, seen, ready, tried = bytearray(), set(), threading.Event(), itertools.count()

    def record(is_over: threading.Event) -> None:
        with socket.create_server((there, PORT)) as listening:
            ready.set()
            relay(listening, (here, PORT), heard, is_over)

    def disturb(is_over: threading.Event) -> None:
        sent = [b"", b"x" * 64, pickle.dumps(Touch(tmp_path / "ran")), b"GET / HTTP/1.1\r\n\r\n", os.urandom(999)]
        sent += [number.to_bytes(8, "little") for number in range(6)]  # how peers of a rank begin, in gloo
        sent += [b"\x00\xce\xf7\x85\x3c", b"\x00" * 5]  # how clients of torch's own store begin
        open_: list[socket.socket] = []
        while not is_over.wait(0.0005):
            with contextlib.suppress(OSError, IndexError):
                seen.update(listening_ports(started.pid))
                doors = sorted(port for address, port in seen if address == here)
                number = next(tried)
                said = [*sent, bytes(heard)][number % (len(sent) + 1)]
                open_.append(socket.create_connection((here, doors[number // 14 % len(doors)]), timeout=1))
                open_[-1].send(said)
            while len(open_) > 200:
                open_.pop(0).close()
        for each in open_:
            each.close()

    until(lambda: any(port == PORT for _, port in listening_ports(started.pid)), started)
    with in_network(second, record):
        assert ready.wait(10)
        joins = {here: f"{here}:{PORT}", there: f"{there}:{PORT}"}
        with in_network(second, disturb):
            agents = [
                host.start("agent", "--join", joins[name], "--name", name, cwd=tmp_path, env=env, network=network)
                for network, name in hosts
            ]
            assert started.wait() == 0, started.said
            assert [agent.wait() for agent in agents] == [0, 0]
    assert next(tried) > 200
    assert len(heard) > 100
    assert not (tmp_path / "ran").exists()
    # gloo authenticates no peer: a stranger in its place is found by the proof of the group, and costs a restart.
    assert started.json["restarts"] >= 1
    assert committed(saves(tmp_path)) == STEPS
    assert [record["step"] for record in records(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert f"rejected a connection from {there}: it does not hold the key of this run" in started.said
    assert f"store: rejected a connection from {there}" in started.said
    assert "c10d" not in started.said
    assert {address for address, _ in seen} == {here}  # no port at other interfaces, none of IPv6
    env.pop("SHOAL_FAULTS")
    plain = host.run(*words[:-1], f"{STEPS}step", "--run.dir", "plain", "--nproc", "2", cwd=tmp_path)
    assert plain.code == 0, plain.said
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-12)


SECONDS_TO_FIND = 0.1
"""A stranger has to find the number of a port first. Here it is read at once, also before the port is filtered."""


def knock(doors: Callable[[], list[tuple[str, int]]], opened: set[int], is_over: threading.Event) -> None:
    """Try to connect to all of some ports at once, again and again; send the numbers of gloo's peers."""
    pending: list[tuple[float, socket.socket, int]] = []
    held: list[socket.socket] = []
    for number in itertools.count():
        if is_over.wait(0.002):
            break
        for address in doors():
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(address)
            pending.append((time.monotonic(), each, address[1]))
        ready = select.select([], [each for _, each, _ in pending], [], 0)[1]
        for began, each, port in list(pending):
            if each in ready or time.monotonic() - began > 0.5:
                pending.remove((began, each, port))
                if each in ready and not each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    opened.add(port)
                    with contextlib.suppress(OSError):
                        each.send((number % 4).to_bytes(8, "little"))
                    held.append(each)
                else:
                    each.close()
        while len(held) > 300:
            held.pop(0).close()
    for each in (*held, *(each for _, each, _ in pending)):
        each.close()


def test_a_stranger_on_another_host_takes_no_connection_of_gloo(
    host: Host, hosts: list[tuple[str, str]], stranger: str, tmp_path: Path
) -> None:
    (first, here), (_, there) = hosts
    env = {"SHOAL_KEY": "a key for a test of strangers"}
    words = [*WORDS, "--run.dir", "run", "--checkpoint.every", "1step", "--run.duration", "300step"]
    meeting = ["--hosts", f"{here}:1,{there}:1", "--ssh", "none", "--listen", f"{here}:{PORT}"]
    started = host.start(*words, *meeting, cwd=tmp_path, env=env, network=first)
    opened: set[int] = set()
    since: dict[tuple[str, int], float] = {}

    def doors() -> list[tuple[str, int]]:
        with contextlib.suppress(OSError):
            found = [each for each in listening_ports(started.pid) if each[0] == here and each[1] != PORT]
            return [
                each for each in found if time.monotonic() - since.setdefault(each, time.monotonic()) > SECONDS_TO_FIND
            ]
        return []

    until(lambda: any(port == PORT for _, port in listening_ports(started.pid)), started)
    with in_network(stranger, lambda is_over: knock(doors, opened, is_over)):
        agents = [
            host.start("agent", "--join", f"{here}:{PORT}", "--name", name, cwd=tmp_path, env=env, network=network)
            for network, name in hosts
        ]
        metrics = tmp_path / "run" / "metrics.jsonl"
        until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 3, started)
        time.sleep(1.5)
        assert len(doors()) > 1
        assert opened == {PORT + 1}  # that of the store, which authenticates: the stranger reaches the host
        os.kill(started.pid, signal.SIGTERM)
        assert started.wait() == 130, started.said
    assert [agent.wait() for agent in agents] == [0, 0]
    kinds = [json.loads(line)["event"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert {kind for kind in kinds if kind != "saved"} == {"started", "stopped"}, started.said
    assert "every address may connect" not in started.said
