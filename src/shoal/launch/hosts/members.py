"""The hosts of a run as the coordinator sees them: who has joined, who is silent, who is a stranger.

One selector serves all connections, and nothing else blocks. A connection has to prove the key first (`Stranger`); then
its host says its name and versions, and becomes a `Member`. What members report is returned by `Members.turn`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shoal.errors import Problem, ShoalError
from shoal.launch.hosts.hostlist import HostSpec
from shoal.launch.hosts.messages import BEAT, PROCESS_SILENCE, Channel, Ended, Message, Stranger, WrongKey
from shoal.launch.hosts.versions import MUST_AGREE, facts

TURN = 0.1
MOST_STRANGERS = 64
"""Connections without a proof at one time; the oldest gives way. A true agent proves itself in milliseconds."""
MOST_LOGGED = 5
"""Rejections of one address for one reason that are printed."""

Event = tuple["Member", Message]


@dataclass(slots=True, eq=False)
class Member:
    """One host of the run."""

    spec: HostSpec
    channel: Channel | None = None
    """None: it has not joined, or is lost."""
    lost_at: float = 0.0
    address: str = ""
    partial: dict[int, str] = field(default_factory=dict)
    """Output stream → the beginning of a line that has not ended yet."""

    @property
    def name(self) -> str:
        """The name of the host in --hosts."""
        return self.spec.name

    @property
    def is_here(self) -> bool:
        """Whether its agent is connected."""
        return self.channel is not None


@dataclass(slots=True)
class Members:
    """All hosts, and the socket at which their agents join."""

    hosts: Sequence[HostSpec]
    key: bytes = field(repr=False)
    listening: socket.socket
    say: Callable[[str], None]
    members: list[Member] = field(default_factory=list)
    shows_plain: Member | None = None
    """The host of rank 0, whose output has no prefix."""
    rejected: set[str] = field(default_factory=set)
    """The addresses of processes with a wrong key."""
    has_begun: bool = False
    """Whether ranks have been started: from then on no agent that joins can end the run."""
    _strangers: list[Stranger] = field(default_factory=list)
    _unnamed: list[tuple[Channel, str]] = field(default_factory=list)
    """Authenticated connections that have not said their name yet."""
    _num_rejected: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Address and reason → rejected connections."""
    _next_beat: float = 0.0
    _stalled: float = 0.0
    _last_turn: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.members = [Member(spec) for spec in self.hosts]
        self.shows_plain = self.members[0]
        self.listening.setblocking(False)

    @property
    def present(self) -> list[Member]:
        """The hosts whose agents are connected, in the order of --hosts."""
        return [member for member in self.members if member.is_here]

    def send(self, members: Sequence[Member], message: Message) -> None:
        """Send a message to some members; a connection that has ended is noticed by `turn`."""
        for member in members:
            if member.channel is not None:
                with contextlib.suppress(Ended):
                    member.channel.send(message)

    def turn(self, seconds: float = TURN) -> list[Event]:
        """Wait a moment, and return what has happened."""
        self._beat()
        with selectors.DefaultSelector() as selector:
            for source, writes in self._sources():
                selector.register(source, selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0))
            ready: set[object] = {key.fileobj for key, _ in selector.select(seconds)}
        events: list[Event] = []
        for member in self.present:
            events += self._read(member, is_ready=member.channel.socket in ready)  # type: ignore[union-attr]
        self._read_strangers(ready)
        events += self._named(ready)
        if self.listening in ready:
            self._accept()
        return [*events, *self._silent()]

    def close(self) -> None:
        """Close all connections, and listen no more."""
        for member in self.present:
            self.lose(member, "the run has ended")
        for source, _ in self._sources():
            source.close()

    def _sources(self) -> Iterator[tuple[socket.socket, bool]]:
        yield self.listening, False
        for stranger in self._strangers:
            yield stranger.socket, False
        for channel, _ in self._unnamed:
            yield channel.socket, bool(channel.num_unsent)
        for member in self.present:
            assert member.channel is not None
            yield member.channel.socket, bool(member.channel.num_unsent)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_turn > 1.0:  # this process was stopped, or slept: it knows nothing about the others
            self._stalled = now - self._last_turn
        self._last_turn = now
        if now >= self._next_beat:
            self._next_beat = now + BEAT
            self.send(self.present, {"do": "beat"})

    # ---- members ---------------------------------------------------------------------------------------------------

    def _read(self, member: Member, *, is_ready: bool) -> list[Event]:
        assert member.channel is not None
        try:
            member.channel.flush()
            messages = member.channel.read() if is_ready else []
        except Ended as error:
            return [self.lose(member, f"the connection to its agent has ended: {error}")]
        for message in messages:
            if message.get("say") == "output":
                self._show(member, int(message["stream"]), str(message["text"]))
        return [(member, message) for message in messages if message.get("say") not in ("beat", "output")]

    def _silent(self) -> list[Event]:
        stalled, self._stalled = self._stalled, 0.0
        silent = [(each, each.channel.silence(stalled)) for each in self.present if each.channel is not None]
        return [self.lose(member, why) for member, why in silent if why]

    def lose(self, member: Member, why: str) -> Event:
        """Forget the connection of a member."""
        if member.channel is not None:
            member.channel.close()
        member.channel, member.lost_at = None, time.monotonic()
        return member, {"say": "lost", "why": why}

    def _show(self, member: Member, stream: int, text: str) -> None:
        """Print output of a host: that of rank 0's host as it is, the lines of others with the name in front."""
        target = sys.stdout if stream == 1 else sys.stderr
        if member is self.shows_plain:
            target.write(text)
        else:
            *lines, member.partial[stream] = (member.partial.get(stream, "") + text).split("\n")
            target.write("".join(f"[{member.name}] {line}\n" for line in lines))
        target.flush()

    # ---- strangers -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            for _ in range(16):
                connection, address = self.listening.accept()
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stranger = Stranger(connection, str(address[0]), self.key)
                self._strangers.append(stranger)
                try:
                    stranger.greet()
                except Ended as error:
                    self._reject(stranger, str(error))
                if len(self._strangers) > MOST_STRANGERS:
                    self._reject(self._strangers[0], "too many connections prove nothing")

    def _read_strangers(self, ready: set[object]) -> None:
        now = time.monotonic()
        for stranger in list(self._strangers):
            try:
                channel = stranger.read() if stranger.socket in ready else None
                if channel is None and now > stranger.deadline:
                    raise Ended("it proved nothing in time")
            except Ended as error:
                self._reject(stranger, str(error), has_wrong_key=isinstance(error, WrongKey))
                continue
            if channel is not None:
                self._strangers.remove(stranger)
                self._unnamed.append((channel, stranger.address))

    def _reject(self, stranger: Stranger, why: str, *, has_wrong_key: bool = False) -> None:
        self._strangers.remove(stranger)
        with contextlib.suppress(OSError):
            stranger.socket.close()
        address = stranger.address
        if has_wrong_key:
            self.rejected.add(address)
        self._num_rejected[address, why] += 1
        if self._num_rejected[address, why] <= MOST_LOGGED:
            last = "; further ones are not printed" if self._num_rejected[address, why] == MOST_LOGGED else ""
            self.say(f"rejected a connection from {address}: {why}{last}")

    # ---- new members -----------------------------------------------------------------------------------------------

    def _named(self, ready: set[object]) -> list[Event]:
        events: list[Event] = []
        for channel, address in list(self._unnamed):
            try:
                messages = channel.read() if channel.socket in ready else []
                if not messages and time.monotonic() - channel.last_read > PROCESS_SILENCE:
                    raise Ended("it did not say its name")
            except Ended:
                channel.close()
                self._unnamed.remove((channel, address))
                continue
            if messages:
                self._unnamed.remove((channel, address))
                events += self._admit(channel, address, messages[0])
        return events

    def _admit(self, channel: Channel, address: str, hello: Message) -> list[Event]:
        name = str(hello.get("name"))
        member = next((each for each in self.members if each.spec.is_called(name)), None)
        if member is None:
            names = ", ".join(each.name for each in self.members)
            why = f"an agent on {address} calls itself {name[:80]!r}, but --hosts has {names}"
            return self._send_away(channel, why)
        if member.is_here:
            return self._send_away(channel, f"a second agent of host {member.name} on {address}")
        if (problem := _other_version(member, hello)) is not None:
            self._send_away(channel, problem.what)
            if not self.has_begun:
                raise ShoalError(problem)
            return []
        member.channel, member.address = channel, address
        return [(member, {**hello, "say": "joined"})]

    def _send_away(self, channel: Channel, why: str) -> list[Event]:
        self.say(f"{why}: it was sent away")
        with contextlib.suppress(Ended):
            channel.send({"do": "leave"})
        channel.close()
        return []


def _other_version(member: Member, hello: Message) -> Problem | None:
    for what, ours in facts().items():
        theirs = str(hello.get(what))
        if what in MUST_AGREE and theirs != ours:
            return Problem(
                "N056",
                f"host {member.name} has {what} {theirs[:80]}, but the coordinator has {ours}",
                f"install {what} {ours} on {member.name}, or start the run from a host like it",
            )
    return None
