"""The hosts of a run as the coordinator sees them: who has joined, who is silent, who is a stranger.

One selector serves all connections, and nothing else blocks. A connection has to prove the key first (`Listener`); then
its host says its name and versions, and becomes a `Member`. What members report is returned by `Members.turn`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shoal.errors import Problem, ShoalError
from shoal.launch.hosts.hostlist import HostSpec, called
from shoal.launch.hosts.listener import Listener
from shoal.launch.hosts.messages import BEAT, PROCESS_SILENCE, Channel, Ended, Message
from shoal.launch.hosts.output import Lines
from shoal.launch.hosts.reports import plain_error
from shoal.launch.hosts.versions import MUST_AGREE, facts

TURN = 0.1
MOST_GAP = 1.0
"""Seconds between two looks at the clock; after more, this process was stopped, or slept."""

Event = tuple["Member", Message]


@dataclass(slots=True, eq=False)
class Member:
    """One host of the run."""

    spec: HostSpec
    channel: Channel | None = None
    """None: it has not joined, or is lost."""
    lost_at: float = 0.0
    address: str = ""
    beat_at: float = 0.0
    """The moment of its last heartbeat, by the clock of its host."""
    is_left_out: bool = False
    """Whether it cannot run the job, so that the others continue without it until its agent joins again."""
    lines: dict[int, Lines] = field(default_factory=lambda: {1: Lines(), 2: Lines()})
    """Output stream → its lines."""

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
    listener: Listener = field(init=False)
    has_begun: bool = False
    """Whether ranks have been started: from then on no agent that joins can end the run."""
    each_turn: Callable[[], None] = lambda: None
    """Called in each turn; may raise."""
    _unnamed: list[tuple[Channel, str]] = field(default_factory=list)
    """Authenticated connections that have not said their name yet."""
    _next_beat: float = 0.0
    _stalled: float = 0.0
    _last_look: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.members = [Member(spec) for spec in self.hosts]
        self.shows_plain = self.members[0]
        self.listener = Listener(self.listening, self.key, self.say)

    @property
    def present(self) -> list[Member]:
        """The hosts whose agents are connected, in the order of --hosts."""
        return [member for member in self.members if member.is_here]

    @property
    def usable(self) -> list[Member]:
        """The hosts that are present and can run the job."""
        return [member for member in self.present if not member.is_left_out]

    def send(self, members: Sequence[Member], message: Message) -> None:
        """Send a message to some members; a connection that has ended is noticed by `turn`."""
        for member in members:
            if member.channel is not None:
                with contextlib.suppress(Ended):
                    member.channel.send(message)

    def confirm_lead(self) -> None:
        """Report to each agent that this coordinator has led since its last heartbeat was read."""
        for member in self.present:
            self.send([member], {"do": "leads", "at": member.beat_at})

    def turn(self, seconds: float = TURN) -> list[Event]:
        """Wait a moment, and return what has happened."""
        self.each_turn()
        self._beat()
        with selectors.DefaultSelector() as selector:
            for source, writes in self._sources():
                selector.register(source, selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0))
            ready: set[object] = {key.fileobj for key, _ in selector.select(seconds)}
        self._look_at_clock()
        events: list[Event] = []
        for member in self.present:
            events += self._read(member, is_ready=member.channel.socket in ready)  # type: ignore[union-attr]
        self._unnamed += self.listener.admit(ready)
        events += self._named(ready)
        return [*events, *self._silent()]

    def close(self) -> None:
        """Close all connections, and listen no more."""
        for member in self.present:
            self.lose(member, "the run has ended")
        for source, _ in self._sources():
            source.close()

    def _sources(self) -> Iterator[tuple[socket.socket, bool]]:
        for source in self.listener.sources():
            yield source, False
        for channel, _ in self._unnamed:
            yield channel.socket, bool(channel.num_unsent)
        for member in self.present:
            assert member.channel is not None
            yield member.channel.socket, bool(member.channel.num_unsent)

    def _look_at_clock(self) -> float:
        """Note for how long this process did not run: about that time it knows nothing of the others."""
        now = time.monotonic()
        if now - self._last_look > MOST_GAP:
            self._stalled += now - self._last_look
        self._last_look = now
        return now

    def _beat(self) -> None:
        now = self._look_at_clock()
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
            elif message.get("say") == "beat":
                member.beat_at = float(message["at"])
            elif message.get("say") in ("ended", "stopped"):
                self._show_rest(member)
        return [(member, message) for message in messages if message.get("say") not in ("beat", "output")]

    def _silent(self) -> list[Event]:
        stalled, self._stalled = self._stalled, 0.0
        silent = [(each, each.channel.silence(stalled)) for each in self.present if each.channel is not None]
        return [self.lose(member, why) for member, why in silent if why]

    def lose(self, member: Member, why: str) -> Event:
        """Forget the connection of a member."""
        if member.channel is not None:
            member.channel.close()
        self._show_rest(member)
        member.channel, member.lost_at = None, time.monotonic()
        return member, {"say": "lost", "why": why}

    def _show(self, member: Member, stream: int, text: str) -> None:
        """Print output of a host: that of rank 0's host as it is, the lines of others with the name in front."""
        target = sys.stdout if stream == 1 else sys.stderr
        if member is self.shows_plain:
            target.write(text)
        else:
            target.write("".join(f"[{member.name}] {line}\n" for line in member.lines[stream].add(text)))
        target.flush()

    def _show_rest(self, member: Member) -> None:
        """Print the lines that a host has not ended."""
        for stream, lines in member.lines.items():
            for line in lines.flush():
                print(f"[{member.name}] {line}", file=sys.stdout if stream == 1 else sys.stderr, flush=True)

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
        found = called(name, self.hosts)
        member = next((each for each in self.members if each.spec is found), None)
        if member is None:
            names = ", ".join(each.name for each in self.members)
            what = f"an agent on {address} calls itself {name[:80]!r}, but --hosts has {names}"
            fix = f"shoal agent --join ... --name {self.members[0].name}, or another name of --hosts"
            return self._send_away(channel, Problem("N070", what, fix))
        if (problem := _other_version(member, hello)) is not None:
            self._send_away(channel, problem)
            if not self.has_begun:
                raise ShoalError(problem)
            return []
        events = [self._replace(member, address)] if member.is_here else []
        member.channel, member.address, member.is_left_out = channel, address, False
        member.beat_at = float(hello.get("at", 0.0))
        return [*events, (member, {**hello, "say": "joined"})]

    def _replace(self, member: Member, address: str) -> Event:
        """Lose the connection of a member whose agent has connected again, before the end of the old one was seen."""
        self.say(f"a new agent of host {member.name} on {address} takes the place of the one on {member.address}")
        what = f"a new agent of host {member.name} on {address} has taken the place of this one"
        problem = Problem("N071", what, "one agent a host; end the other one, and start this one again")
        # It has to leave: else two agents would take each other's place for ever.
        self.send([member], {"do": "leave", "error": plain_error(ShoalError(problem))})
        return self.lose(member, f"another agent of it has joined from {address}")

    def _send_away(self, channel: Channel, problem: Problem) -> list[Event]:
        self.say(f"{problem.what}: it was sent away")
        with contextlib.suppress(Ended):
            channel.send({"do": "leave", "error": plain_error(ShoalError(problem))})
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
