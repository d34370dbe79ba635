"""Agents and strangers at the door of a coordinator: who holds the key is admitted, all others are sent away."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import pickle
import select
import selectors
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shoal.cli.agent.prepare import check_recipe
from shoal.cli.train import main as train
from shoal.comm.rendezvous.key import Key
from shoal.comm.rendezvous.listener_guard import Peers
from shoal.errors import ShoalError
from shoal.launch.hosts import listener as listener_module
from shoal.launch.hosts import members as members_module
from shoal.launch.hosts import messages as messages_module
from shoal.launch.hosts.agent.join import join, run_agent
from shoal.launch.hosts.agent.probe import Probe
from shoal.launch.hosts.generation import peers_of
from shoal.launch.hosts.hostlist import HostSpec, called, check_names, choose_address, read_hosts
from shoal.launch.hosts.members import Member, Members
from shoal.launch.hosts.messages import CHALLENGE, MAGIC, MOST, PROOF, Channel, Ended, Message, Stranger, prove
from shoal.launch.hosts.ssh import command_for, is_reached, start_agent, why_ended
from shoal.launch.stop_signals import STOP_SIGNALS
from tests.rejects import rejects

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def door() -> Iterator[tuple[Members, list[str]]]:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listening:
        door = Members([HostSpec("a", 1), HostSpec("b", 2)], KEY, listening, said.append)
        yield door, said
        door.close()


def address(door: Members) -> tuple[str, int]:
    return door.listening.getsockname()[:2]


def served(door: Members, act: Callable[[], Any], seconds: float = 10.0) -> tuple[Any, list[Any]]:
    """The result of a function in a thread while the door is served, and what the members reported."""
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(act())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    events, deadline = [], time.monotonic() + seconds
    while thread.is_alive():
        events += door.turn(0.01)
        assert time.monotonic() < deadline
    for _ in range(5):
        events += door.turn(0.01)
    return results[0], events


@pytest.fixture
def pair() -> Iterator[Callable[[], tuple[Channel, Channel]]]:
    """A function that makes both ends of an authenticated connection: the coordinator's and the agent's."""
    with contextlib.ExitStack() as stack:
        yield lambda: _pair(stack)


def _pair(stack: contextlib.ExitStack) -> tuple[Channel, Channel]:
    near, far = map(stack.enter_context, socket.socketpair())
    near.setblocking(False)
    far.settimeout(5)
    stranger = Stranger(near, "there", KEY)
    stranger.greet()
    found: list[Channel] = []
    thread = threading.Thread(target=lambda: found.append(prove(far, KEY)))
    thread.start()
    channel = None
    while channel is None:
        channel = stranger.read()
    thread.join()
    return channel, found[0]


def test_messages_arrive_once_in_order_and_unchanged(pair: Callable[[], tuple[Channel, Channel]]) -> None:
    ours, theirs = pair()
    theirs.send({"say": "one"})
    recorded = ours.socket.recv(2**16, socket.MSG_PEEK)
    theirs.send({"say": "two", "text": "ü" * 1000})
    assert [message["say"] for message in ours.read()] == ["one", "two"]
    for forged in (recorded, recorded[:-2] + b"x}", bytes(4) + recorded[4:], (MOST + 1).to_bytes(4, "big")):
        ours, theirs = pair()
        if forged is recorded:  # of another session, and of this one a second time
            theirs.socket.send(forged)
            with pytest.raises(Ended, match="repeated"):
                ours.read()
            ours, theirs = pair()
            theirs.send({"say": "one"})
            forged = ours.socket.recv(2**16, socket.MSG_PEEK)
            assert ours.read() == [{"say": "one"}]
        theirs.socket.send(forged)
        with pytest.raises(Ended, match=r"repeated|at most"):
            ours.read()
    ours, theirs = pair()
    ours.send({"do": "stop"})
    theirs.socket.send(theirs.socket.recv(2**16))  # sent back to where it came from
    with pytest.raises(Ended, match="repeated"):
        ours.read()


def test_an_agent_joins_through_a_crowd_of_strangers(door: tuple[Members, list[str]]) -> None:
    coordinator, said = door
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection(address(coordinator))) for _ in range(150)]
        for number, stranger in enumerate(crowd):
            stranger.send([b"", b"x", b"GET / HTTP/1.1\r\n" * 9, pickle.dumps([1] * 50)][number % 4])
        channel, events = served(coordinator, lambda: join(address(coordinator), Key(KEY, "here"), "b"))
        assert [(member.name, event["say"]) for member, event in events] == [("b", "joined")]
        assert coordinator.members[1].is_here
        assert not coordinator.members[0].is_here
        assert len(coordinator.listener.strangers) <= listener_module.MOST_STRANGERS
        assert len(said) < 25  # a flood does not fill the log
        assert any("rejected a connection from 127.0.0.1: it does not hold the key" in text for text in said)
        # A process that holds the key, but is of no listed host, is sent away.
        other, events = served(coordinator, lambda: join(address(coordinator), Key(KEY, "h"), "c"))
        assert events == []
        assert [order["error"]["problems"][0][0] for order in other.read() if order["do"] == "leave"] == ["N070"]
        other.close()
        # An agent that connects again, before the end of its old connection is seen, takes its own place.
        second, events = served(coordinator, lambda: join(address(coordinator), Key(KEY, "h"), "b"))
        assert [(member.name, event["say"]) for member, event in events] == [("b", "lost"), ("b", "joined")]
        assert [order["error"]["problems"][0][0] for order in channel.read() if order["do"] == "leave"] == ["N071"]
        assert coordinator.members[1].is_here
        channel.close()
        second.close()
        (event,) = (event for _ in range(20) for event in coordinator.turn(0.02))
        assert event[1]["say"] == "lost"


def test_a_flood_from_one_address_does_not_evict_others(door: tuple[Members, list[str]]) -> None:
    coordinator, _ = door
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            socket.create_connection(address(coordinator), source_address=("127.0.0.9", 0))
        )  # the oldest
        coordinator.turn(0.01)
        for _ in range(listener_module.MOST_STRANGERS + 10):
            stack.enter_context(socket.create_connection(address(coordinator)))
            coordinator.turn(0.01)
        assert [each.address for each in coordinator.listener.strangers].count("127.0.0.9") == 1


def test_a_connection_that_breaks_in_the_handshake_is_tried_again() -> None:
    """A flooded coordinator closes connections; that is no other key."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepted = []

        def close_some() -> None:
            while len(accepted) < 2:
                connection = listening.accept()[0]
                accepted.append(connection)
                connection.send(MAGIC + bytes(32))
                connection.recv(PROOF)
                connection.close()

        thread = threading.Thread(target=close_some)
        thread.start()
        with rejects("N053", "it closed the connection"):
            join(listening.getsockname()[:2], Key(KEY, "here"), "b", seconds=0.5)
        thread.join()
    assert len(accepted) == 2


@pytest.mark.parametrize(("wait", "most"), [(0.8, 2.0), (0.0, 2.0)])
def test_an_agent_waits_for_a_coordinator_as_long_as_it_was_told(wait: float, most: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()[:2]
    began = time.monotonic()
    with rejects("N072", "host b found no coordinator there"):
        join(address, Key(KEY, "here"), "b", seconds=4.0 if wait else 0.5, wait=wait)
    assert time.monotonic() - began < most


def connected(stack: contextlib.ExitStack) -> tuple[Channel, socket.socket]:
    """A channel over TCP, and its peer, which reads nothing by itself."""
    listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    ours = stack.enter_context(socket.create_connection(listening.getsockname()))
    ours.setblocking(False)
    return Channel(ours, KEY, KEY), stack.enter_context(listening.accept()[0])


def test_a_host_whose_process_reads_slowly_or_not_at_all_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_module, "SILENCE", 0.15)
    with contextlib.ExitStack() as stack:
        channel, peer = connected(stack)
        while not channel.num_unsent:
            channel.send({"text": "x" * 50_000})
        for number in range(20):  # the queue never becomes empty, and then its reader stops (Ctrl-S)
            assert channel.silence() == "", number
            channel.send({"text": "x" * 50_000})
            if number < 8:
                peer.recv(2**16)
            time.sleep(0.03)
        monkeypatch.setattr(messages_module, "_seconds_without_answer", lambda connection: float("inf"))
        time.sleep(0.2)
        assert "has not answered" in channel.silence()


def test_a_reset_does_not_wait_behind_what_was_not_acknowledged() -> None:
    with contextlib.ExitStack() as stack:
        channel, peer = connected(stack)
        while not channel.num_unsent:
            channel.send({"text": "x" * 50_000})
        channel.reset()
        time.sleep(0.1)
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET


def test_a_stop_of_the_coordinator_does_not_count_as_silence_of_others(
    door: tuple[Members, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped in its `select`, and agents that are stopped with it have sent nothing meanwhile."""
    coordinator, _ = door
    channel, _ = served(coordinator, lambda: join(address(coordinator), Key(KEY, "here"), "b"))
    select_ = selectors.DefaultSelector.select

    def stopped(self: Any, timeout: float | None = None) -> Any:
        time.sleep(0.3)
        return select_(self, 0)

    monkeypatch.setattr(members_module, "MOST_GAP", 0.2)
    for member in coordinator.present:
        assert member.channel is not None
        silence = type(member.channel).silence
    monkeypatch.setattr(Channel, "silence", lambda self, stalled: silence(self, stalled, 0.2))
    monkeypatch.setattr(selectors.DefaultSelector, "select", stopped)
    coordinator.turn(0.01)
    assert coordinator.members[1].is_here
    channel.close()


def test_lines_of_other_hosts_begin_with_their_name(
    door: tuple[Members, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator, _ = door
    for member in coordinator.members:
        coordinator._show(member, 2, "half of ")
        coordinator._show(member, 2, "a line\nand")
    assert capsys.readouterr().err == "half of a line\nand[b] half of a line\n"
    coordinator.lose(coordinator.members[1], "gone")
    assert capsys.readouterr().err == "[b] and\n"


def test_who_proves_nothing_in_time_is_sent_away(
    door: tuple[Members, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, said = door
    with socket.create_connection(address(coordinator)) as slow:
        coordinator.turn(0.01)
        coordinator.listener.strangers[0].deadline = time.monotonic() + 0.05
        assert len(slow.recv(CHALLENGE)) == CHALLENGE
        for _ in range(20):
            with contextlib.suppress(OSError):
                slow.send(b"x")
            time.sleep(0.005)
            coordinator.turn(0.01)
        assert coordinator.listener.strangers == []
        assert said == ["rejected a connection from 127.0.0.1: it proved nothing in time"]


def test_other_keys_and_other_versions_are_named(
    door: tuple[Members, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, _ = door
    error, events = served(coordinator, lambda: join(address(coordinator), Key(OTHER, "SHOAL_KEY"), "b"))
    assert (error.codes, events) == (("N052",), [])
    assert "SHOAL_KEY" in str(error)
    assert coordinator.listener.rejected == {"127.0.0.1"}
    facts = members_module.facts()
    monkeypatch.setattr(members_module, "facts", lambda: {**facts, "torch": "9.9"})
    with rejects("N056", "host b has torch"), contextlib.closing(late := Late()):
        served(coordinator, lambda: late.keep(join(address(coordinator), Key(KEY, "here"), "b")))


class Late:
    """Keeps a channel of a thread, to be closed."""

    def keep(self, channel: Channel) -> None:
        self.channel = channel

    def close(self) -> None:
        for _ in range(100):
            if hasattr(self, "channel"):
                self.channel.close()
                return
            time.sleep(0.02)


def test_an_address_without_a_coordinator_is_named_in_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = taken.getsockname()[:2]
    with rejects("N072", f"nothing listens at 127.0.0.1:{where[1]}", f"--listen 127.0.0.1:{where[1]}"):
        join(where, Key(KEY, "here"), "b", seconds=0.3)


def test_an_agent_waits_for_a_coordinator_that_starts_later_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = taken.getsockname()[:2]

    def start_later() -> Any:
        time.sleep(0.5)
        with socket.create_server(where) as listening:
            door = Members([HostSpec("b", 1)], KEY, listening, said.append)
            while not door.present:
                door.turn(0.01)
            door.close()

    said: list[str] = []
    thread = threading.Thread(target=start_later)
    thread.start()
    channel = join(where, Key(KEY, "here"), "b", seconds=0.1, wait=5.0)
    thread.join()
    channel.close()
    expected = f"shoal agent: waiting 5 s for a coordinator at 127.0.0.1:{where[1]}: nothing listens there yet\n"
    assert capsys.readouterr().err == expected


def test_an_agent_that_is_sent_away_says_why(door: tuple[Members, list[str]]) -> None:
    coordinator, _ = door
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    with socket.create_server(("127.0.0.1", 0)):
        error, _ = served(coordinator, lambda: _as_agent(address(coordinator), "c"))
    assert isinstance(error, ShoalError)
    assert error.codes == ("N070",)
    assert "calls itself 'c', but --hosts has a, b" in str(error)
    assert before == {number: signal.getsignal(number) for number in STOP_SIGNALS}


def _as_agent(where: tuple[str, int], name: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal, "signal", lambda number, handler: None)  # works in the main thread only
        return run_agent(where, Key(KEY, "here"), name, lambda order: pytest.fail("nothing to prepare"))


@pytest.mark.parametrize(
    ("script", "code", "text"),
    [
        ("echo 'Permission denied (publickey).'; exit 255", "N054", "exit code 255: Permission denied (publickey)."),
        ("exit 91", "N055", "has no directory"),
        ("exit 92", "N055", "has no program"),
        ("echo 'python: No module named shoal'; exit 1", "N055", "has no shoal"),
        (
            """echo '{"error": {"problems": [{"code": "N053", "what": "cut off", "fix": "x"}]}}'; exit 2""",
            "N053",
            "cut",
        ),
    ],
)
def test_a_command_that_starts_no_agent_is_explained(script: str, code: str, text: str) -> None:
    command = start_agent(HostSpec("b", 1), ("10.0.0.1", 29400), "secret", shlex.join(["sh", "-c", script]))
    command.end(5)
    error = why_ended(command)
    assert error.codes == (code,)
    assert text in str(error)
    assert "secret" not in " ".join(command.words)


def test_a_port_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.launch.hosts.agent import probe as probe_module

    monkeypatch.setattr(probe_module, "SECONDS", 0.3)
    open_, closed = Probe(), Probe()
    there, gone = open_.listen("127.0.0.1", 0), closed.listen("127.0.0.1", 0)
    closed.close()
    prober = Probe()
    targets = [["b", "127.0.0.1", there["port"]], ["c", "127.0.0.1", gone["port"]], ["d", "192.0.2.1", 9]]
    prober.reach(targets)  # 192.0.2.1 is of no host
    report, deadline = None, time.monotonic() + 5
    while report is None:
        assert time.monotonic() < deadline
        report = prober.turn(set(select.select([], list(prober.pending), [], 0.05)[1]))
    names = [target.split()[0] for target, _ in report["failed"]]
    open_.close()
    assert names == ["c", "d"]


def reached(prober: Probe, targets: list[list[object]]) -> Message:
    """The report of a host that has connected to others."""
    prober.reach(targets)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        report = prober.turn(set(select.select([], list(prober.pending), [], 0.05)[1]))
        if report is not None:
            return report
    raise AssertionError


def test_a_host_learns_from_where_others_connect_and_believes_no_stranger() -> None:
    here, there = Probe(), Probe()
    listening = here.listen("127.0.0.1", 0)
    report = reached(there, [["host here", "127.0.0.1", listening["port"]]])
    socket.create_connection(
        ("127.0.0.1", listening["port"]), timeout=5, source_address=("127.0.0.66", 0)
    ).close()  # a stranger
    here.close()
    assert report["used"] == {"host here": "127.0.0.1"}
    assert "127.0.0.1" in report["addresses"]
    assert here.seen == {"127.0.0.1", "127.0.0.66"}
    claimed = {"used": ["127.0.0.1"], "addresses": ["127.0.0.1", "10.0.0.2"]}
    assert here.peers(claimed) == (Peers(("127.0.0.1", "10.0.0.2"), "127.0.0.1"), "")
    # the other host has connected from 10.0.0.2, as it says; here, the connection came from another address
    translated, why = here.peers({**claimed, "used": ["10.0.0.2"]})
    assert translated is None
    assert why == "a host has connected from 10.0.0.2, and its connection has not come from there"
    assert here.peers(None)[0] is None
    here.listen("127.0.0.1", 1)  # of the next generation
    assert here.seen == set()
    here.close()


def test_addresses_of_all_hosts_are_sent_to_each_and_only_if_all_have_connected() -> None:
    hosts = [Member(HostSpec(name, 1)) for name in "abc"]
    reports: dict[Member, Message] = {
        host: {
            "used": {f"host {other.name}": f"10.0.{number}.1" for other in hosts if other is not host},
            "addresses": [f"10.0.{number}.1", "172.17.0.1"],
        }
        for number, host in enumerate(hosts)
    }
    addresses = ["10.0.0.1", "10.0.1.1", "10.0.2.1", "172.17.0.1"]
    assert peers_of(hosts[0], reports) == {"used": ["10.0.1.1", "10.0.2.1"], "addresses": addresses}
    del reports[hosts[2]]["used"]["host a"]
    assert peers_of(hosts[0], reports) is None
    assert peers_of(hosts[1], reports) is not None
    assert peers_of(hosts[0], {}) is None


def test_a_program_that_does_not_exist_starts_no_agent() -> None:
    with rejects("N054", "no-such-program"):
        start_agent(HostSpec("b", 1), ("10.0.0.1", 29400), "secret", "no-such-program {host}")
    words = command_for(HostSpec("me@b", 1), ("10.0.0.1", 29400), "ssh -p 22 {host}")
    assert words[:5] == ["ssh", "-p", "22", "me@b", "--"]
    assert len(words) == 6  # one string, which the other shell splits


def test_names_that_only_ssh_knows_are_accepted(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "ssh"
    script.write_text(
        "#!/bin/sh\ncase $4 in alias) echo hostname 10.0.0.9;; far) echo hostname far; echo proxyjump gate;;"
        " broken) exit 255;; *) echo hostname $4;; esac\n"
    )
    script.chmod(0o700)
    names = {
        name: is_reached(HostSpec(name, 1), f"{script} -p 22 {{host}}") for name in ("alias", "far", "broken", "b")
    }
    assert names == {"alias": True, "far": True, "broken": True, "b": False}
    assert is_reached(HostSpec("pod-0", 1), "kubectl exec -i {host} --")


def test_a_host_without_the_recipe_or_with_another_one(tmp_path: Any) -> None:
    path = tmp_path / "recipe.yaml"
    order = {"recipe": hashlib.sha256(b"one").hexdigest(), "name": "b"}
    with rejects("N059", "does not exist there", f"scp {path} b:"):
        check_recipe(path, order)
    path.write_bytes(b"two")
    with rejects("N059", "is not the file"):
        check_recipe(path, order)
    path.write_bytes(b"one")
    check_recipe(path, order)


def test_options_of_hosts_without_hosts_and_hosts_under_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    with rejects("N067", "--listen has no effect"):
        train(["--listen", "10.0.0.1", "--device", "cpu"])
    with rejects("N065", "--min-hosts must be 1 to 1"):
        train(["--hosts", "127.0.0.1:1", "--min-hosts", "2"])
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with rejects("N068", "this is rank 1 of torchrun"):
        train(["--hosts", "127.0.0.1:1"])


def test_hosts_are_read_from_words_and_files(tmp_path: Any) -> None:
    assert read_hosts("a:8,me@b:2", default_slots=None) == [HostSpec("a", 8), HostSpec("me@b", 2)]
    file = tmp_path / "hosts"
    file.write_text("# of a job\na slots=8\nb slots = 4 max_slots=9\n\nc\n")
    expected = [HostSpec("a", 8), HostSpec("b", 4), HostSpec("c", 3)]
    assert read_hosts(str(file), default_slots=3) == expected
    for text in ("a,b:1", "a:0", "a:x", "a:1,a:1", "", "-o:1", "a b:1", "a", "/no/such/file"):
        with pytest.raises(ShoalError) as caught:
            read_hosts(text, default_slots=None)
        assert caught.value.codes == (("N073",) if text in ("a", "/no/such/file") else ("N050",)), text
    assert HostSpec("b.cluster", 1).is_called("b")
    assert not HostSpec("10.0.0.1", 1).is_called("10")


@pytest.mark.parametrize(
    ("name", "hosts", "expected"),
    [
        ("gpu1.rack2", "gpu1.rack1:1,gpu1.rack2:1", "gpu1.rack2"),
        ("gpu1", "gpu1.rack1:1,gpu1.rack2:1", None),
        ("gpu1.rack2", "gpu1.rack1:1", None),
        ("gpu1", "me@gpu1.rack1:1,gpu2.rack1:1", "me@gpu1.rack1"),
        ("gpu1.rack1", "gpu1:1,gpu1.rack1:1", "gpu1.rack1"),
    ],
)
def test_an_agent_gets_the_place_of_its_own_name(name: str, hosts: str, expected: str | None) -> None:
    found = called(name, read_hosts(hosts, default_slots=None))
    assert (found.name if found else None) == expected


@pytest.mark.parametrize(
    ("wanted", "code"), [("0.0.0.0", "N051"), ("0.0.0.0:29400", "N051"), ("0", "N051"), ("::", "N050")]
)
def test_a_coordinator_listens_at_one_address(wanted: str, code: str) -> None:
    """It had listened at every interface, and had sent agents to 0.0.0.0."""
    with rejects(code, f"--listen {wanted} is every interface" if code == "N051" else "--listen must be an address"):
        choose_address([HostSpec("127.0.0.1", 1)], wanted)


def test_the_loopback_is_no_address_for_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.launch.hosts import hostlist

    local, far = HostSpec("127.0.0.1", 1), HostSpec("far", 1)
    assert choose_address([local, HostSpec("localhost", 1)], None) == ("127.0.0.1", 0)
    monkeypatch.setattr(hostlist, "_resolved", lambda name: {"far": ["127.0.1.1"], "here": ["127.0.0.1"]}.get(name, []))
    found = list(
        check_names([local, far, HostSpec("none", 1), HostSpec("alias", 1)], lambda host: host.name == "alias")
    )
    assert [problem.code for problem in found] == ["N051", "N074"]
    assert found[0].what == "host far resolves to 127.0.1.1, the loopback of this host"
    assert found[1].what == "host none cannot be resolved to an address"
    monkeypatch.setattr(HostSpec, "is_local", property(lambda self: self.name != "far"))
    with rejects("N051", "127.0.0.1", "--listen"):
        choose_address([local, far], "here:29400")
