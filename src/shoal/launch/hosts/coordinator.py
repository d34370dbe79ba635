"""The coordinator of a run on several hosts: it starts the agents, and one generation after the other."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.blueprint.plan import Plan
from shoal.comm.rendezvous.key import Key
from shoal.errors import RUN_FAILED, Problem, ShoalError, raise_if
from shoal.launch.hosts.etcd.leadership import LostLead
from shoal.launch.hosts.generation import SECONDS_TO_NOTE, Generation, Grown, Job
from shoal.launch.hosts.hostlist import HostSpec
from shoal.launch.hosts.lifetime import forked
from shoal.launch.hosts.members import TURN, Member, Members
from shoal.launch.hosts.messages import Message
from shoal.launch.hosts.ssh import NOBODY, Command, start_agent, why_ended
from shoal.launch.hosts.store.process import StoreProcess, close_all_but
from shoal.launch.stop_signals import STOP_SIGNALS, queueing_signals

FENCE = 1.0
"""Seconds after a host is lost before a generation without it starts."""
SECONDS_TO_GATHER = 0.6
"""Seconds in which agents join a coordinator that has taken over, before a generation without the others starts. They
have lost the last one before (`hosts.lease`), and look for the next one four times a second."""
QUIET = 0.4
"""The same, after the last agent that has joined."""
SETTLE = 0.5
"""Seconds after the first agent that cannot be started in which others may fail, too."""
RECORD_EVERY = 2.0
"""Seconds between two records of saved steps."""
REVIVAL = 5.0
"""Seconds between two attempts to start the agent of a lost host."""
SECONDS_TO_REVIVE = 30.0
"""Seconds that such an attempt may take, or that a lost agent may need to join again, while its command runs."""

LocalAgent = Callable[[tuple[str, int], str, str], int]
"""Serves as the agent of this host: address, key and name; returns an exit code."""


@dataclass(slots=True)
class Coordinator:
    """All that one run on several hosts needs, from its first agent to its end."""

    members: Members
    store: StoreProcess
    job: Job
    ssh: str
    key_text: str = field(repr=False)
    local_agent: LocalAgent
    timeout: float
    min_hosts: int
    number: int = -1
    """Of the last generation."""
    num_used: int = 0
    """The hosts of the last generation."""
    num_saved: int = 0
    """The newest saved step."""
    shares_disk: bool = True
    """Whether all hosts were found to see the same directory of checkpoints."""
    record: Callable[[Message], None] = lambda state: None
    """Called with the state of the run before each generation, and after saves."""
    state: Message = field(default_factory=dict)
    """Hosts and plan of the last generation."""
    next_record: float = 0.0
    experienced: set[Member] = field(default_factory=set)
    """The hosts that have run the job, and were not lost since."""
    next_revival: float = 0.0
    commands: dict[Member, Command] = field(default_factory=dict)
    local_agents: dict[Member, int] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)
    exit_code: int = RUN_FAILED
    """That of the run, which agents may end with."""

    @property
    def address(self) -> tuple[str, int]:
        """The address at which agents join."""
        host, port = self.members.listening.getsockname()[:2]
        return str(host), int(port)

    def run(self, restart: int) -> Any:
        """Run generations until the run ends or one fails; returns the value of rank 0."""
        while True:
            self.start_agents()
            self.wait_for_hosts(least=len(self.members.members) if self.number < 0 else self.min_hosts)
            self.number += 1
            with contextlib.suppress(Grown):
                return self._run_generation(self._hosts_to_use())

    def _hosts_to_use(self) -> list[Member]:
        """The hosts of the next generation: all that are usable, or as many of them as a plan fits."""
        usable = self.members.usable
        # Without a shared disk, a host that is left out may hold the only copy of a shard.
        hosts = self.job.fitting(usable, self.min_hosts if self.shares_disk else len(usable)) or usable
        if len(hosts) < len(usable):
            names = ", ".join(host.name for host in usable[len(hosts) :])
            self.members.say(f"waiting for others: {names}; {self.job.why_not(usable)}")
        return hosts

    def _run_generation(self, hosts: list[Member]) -> Any:
        generation = Generation(
            self.number, self.members, hosts, self.job, self.store.address, self.signals,
            lambda: self._turn(generation), timeout=self.timeout, shares_disk=self.shares_disk,
            saved_before=self.num_saved,
        )  # fmt: skip
        try:
            generation.check_network()
            generation.prepare()
            check_shared_folder(generation)
            self.shares_disk = generation.shares_disk
            members = [[host.name, host.spec.slots] for host in hosts]
            self.state = {"generation": self.number, "hosts": members, "plan": generation.plan, "job": self.job.name}
            self.store.begin(self.job.name, self.number)
            self._record()
            if len(hosts) != self.num_used:
                plan = Plan.parse(generation.plan).brief()
                self.members.say(f"continuing on {len(hosts)} of {len(self.members.members)} hosts: {plan}")
            self.num_used = len(hosts)
            generation.wait_until(self._fence())
            generation.start()
            self.experienced.update(hosts)
            return generation.watch()
        except Grown:
            raise
        except BaseException as error:
            generation.stop_all(0.0)
            if (newcomer := generation.rejected_by) is not None and self._can_leave_out(newcomer):
                newcomer.is_left_out = True
                self.members.say(f"{error}\n  host {newcomer.name} is left out until its agent joins again")
                raise Grown from None
            raise
        finally:
            self.num_saved = max(self.num_saved, generation.saved_step or 0)
            self.experienced.intersection_update(self.members.present)

    def _turn(self, generation: Generation) -> None:
        """Start missing agents, and record a newer saved step: a run that is taken over must not start at step 0."""
        self.revive()
        newest = generation.saved_step or 0
        if newest > self.num_saved and time.monotonic() > self.next_record:
            self.num_saved, self.next_record = newest, time.monotonic() + RECORD_EVERY
            self._record()

    def _record(self) -> None:
        self.record({**self.state, "num_saved": self.num_saved, "shares_disk": self.shares_disk})

    def _can_leave_out(self, host: Member) -> bool:
        """Whether the run can continue without a host that has rejected the job: others have run it before."""
        others = [each for each in self.members.usable if each is not host]
        return bool(self.experienced) and host not in self.experienced and len(others) >= self.min_hosts

    def _fence(self) -> float:
        """The moment from which a host that is only cut off has noticed it too, and has ended its workers."""
        return max((member.lost_at for member in self.members.members if not member.is_here), default=0.0) + FENCE

    def revive(self) -> None:
        """Start the agents of missing hosts, now and then."""
        if len(self.members.present) < len(self.members.members) and time.monotonic() > self.next_revival:
            self.next_revival = time.monotonic() + REVIVAL
            self._end_stale_commands()
            self.start_agents()

    def _end_stale_commands(self) -> None:
        """End commands whose host was lost some time ago: ssh itself notices that after minutes. An agent needs time to
        start, and one that was cut off joins again by itself, which is sooner than to start another."""
        for member, command in self.commands.items():
            is_old = time.monotonic() > max(command.began, member.lost_at) + SECONDS_TO_REVIVE
            if member.lost_at and is_old and not member.is_here and command.process.poll() is None:
                command.end(0.0)

    def start_agents(self) -> None:
        """Start the agents of hosts that have none."""
        if self.ssh == NOBODY:
            return
        for member in self.members.members:
            if member.is_here or self._is_starting(member):
                continue
            if member.spec.is_local:
                serve = partial(_be_agent, self.local_agent, self.address, self.key_text, member.name)
                self.local_agents[member] = forked(serve)
            else:
                self.commands[member] = start_agent(member.spec, self.address, self.key_text, self.ssh)

    def _is_starting(self, member: Member) -> bool:
        """Whether an agent of this host runs, though it is not connected."""
        if member in self.local_agents:
            with contextlib.suppress(ChildProcessError):
                return os.waitpid(self.local_agents[member], os.WNOHANG)[0] == 0
        return member in self.commands and self.commands[member].process.poll() is None

    def continue_from(self, state: Message) -> None:
        """Take over a run from what the last coordinator has recorded, and wait a moment for its agents."""
        self.number, self.num_saved = int(state["generation"]), int(state["num_saved"])
        self.shares_disk, self.num_used = bool(state["shares_disk"]), len(state["hosts"])
        self.experienced = {member for member in self.members.members if member.name in dict(state["hosts"])}
        until = time.monotonic() + SECONDS_TO_GATHER
        while time.monotonic() < until and not self.experienced <= set(self.members.usable):
            num_joined = len(self.members.usable)
            self._look()
            if len(self.members.usable) > num_joined:
                until = max(until, time.monotonic() + QUIET)

    def wait_for_hosts(self, least: int) -> None:
        """Return when every host has joined, or after a restart this many."""
        began = time.monotonic()
        noted: set[Member] = set()
        while missing := [member for member in self.members.members if member not in self.members.usable]:
            if len(self.members.usable) >= least and len(self.members.members) > least:
                return
            self._look()
            self._check_commands(missing)
            waited = time.monotonic() - began
            if (waited > SECONDS_TO_NOTE or self.ssh == NOBODY) and not noted.issuperset(missing):
                self.members.say(self._waiting_for(missing))
            if waited > SECONDS_TO_NOTE or self.ssh == NOBODY:
                noted = set(missing)
            if waited > self.timeout:
                raise self._missing(missing, waited)

    def _check_commands(self, missing: Sequence[Member]) -> None:
        """Raise if an agent cannot be started. After a loss, the host may need minutes, and it is tried again."""
        for member in missing:
            if member in self.commands and not member.is_here:
                self.commands[member].read()
        ended = [member for member in missing if self._has_failed_to_start(member)]
        if ended and self.number < 0:
            self.pause(SETTLE)  # mistakes in a list of hosts come in numbers: all are reported at once
            errors = [why_ended(self.commands[member]) for member in missing if self._has_failed_to_start(member)]
            raise ShoalError(*(problem for error in errors for problem in error.problems))
        if self.number >= 0:
            self.revive()

    def _has_failed_to_start(self, member: Member) -> bool:
        command = self.commands.get(member)
        return command is not None and not member.is_here and command.process.poll() is not None

    def _waiting_for(self, missing: Sequence[Member]) -> str:
        names = ", ".join(member.name for member in missing)
        rejected = ", ".join(sorted(self.members.listener.rejected))
        key = f"; processes at {rejected} were rejected: they hold another key" if rejected else ""
        failed = [
            why_ended(self.commands[each]).problems[0].what for each in missing if self._has_failed_to_start(each)
        ]
        why = "".join(f"; {each}" for each in failed)
        host, port = self.address
        by_hand = f"on each of them: shoal agent --join {host}:{port} --name NAME"
        fix = (
            by_hand if self.ssh == NOBODY else "look whether `shoal agent` runs on them; --ssh none to start it by hand"
        )
        return f"waiting for {names}{key}{why}\n    fix: {fix}"

    def _missing(self, missing: Sequence[Member], waited: float) -> ShoalError:
        what, _, fix = self._waiting_for(missing).partition("\n    fix: ")
        error = ShoalError(f"no agent joined in {waited:.0f} s: {what}", fix=fix, code="N058")
        if self.ssh == NOBODY:
            error.exit_code = RUN_FAILED  # a scheduler that starts agents may be late: it may try again
        return error

    def pause(self, seconds: float) -> None:
        """Sleep, and keep the agents' heartbeats going."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._look(min(0.1, max(0.0, until - time.monotonic())))

    def _look(self, seconds: float = TURN) -> None:
        """Wait a moment between generations, and report the hosts that are lost in it."""
        self.raise_on_signal()
        for member, event in self.members.turn(seconds):
            if event["say"] == "lost":
                self.members.say(f"host {member.name} is lost: {event['why']}")

    def raise_on_signal(self) -> None:
        """Raise if a signal has come."""
        if self.signals:
            number = self.signals.pop(0)
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def close(self, *, lets_go: bool = True) -> None:
        """End the store, and let the agents go. `lets_go` False: only close the connections, so that the agents join
        the next coordinator."""
        self.members.each_turn = lambda: None
        if lets_go:
            self.members.send(self.members.present, {"do": "leave", "code": self.exit_code})
        deadline = time.monotonic() + (2.0 if lets_go else 0.0)
        while self.members.present and time.monotonic() < deadline:
            self.members.turn(0.05)
        self.members.close()
        for command in self.commands.values():
            command.end(1.0)
        for pid in self.local_agents.values():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self.store.close()


def check_shared_folder(generation: Generation) -> None:
    """Let the first host write a file beside the checkpoints. If another one does not see it, each host saves copies
    for its neighbour; raises if none are made (`checkpoint.memory_every` is 0)."""
    lead, *others = generation.hosts
    folder = generation.prepared[lead].get("saves_to")
    if not others or not folder or not generation.shares_disk:
        return
    order = {"generation": generation.number, "token": f".shoal-{secrets.token_hex(16)}"}
    written: dict[Member, Message] = {}
    generation.all.send([lead], {**order, "do": "write token", "folder": folder})
    generation.collect(written, "token written", of=[lead])
    order["folder"] = written[lead]["folder"]
    if not order["folder"]:
        return
    found: dict[Member, Message] = {}
    try:
        generation.all.send(others, {**order, "do": "find token"})
        generation.collect(found, "token found", of=others)
    finally:
        generation.all.send([lead], {**order, "do": "remove token"})
    blind = [host for host in others if not found[host]["is_found"]]
    if blind and generation.prepared[lead].get("has_copies"):
        generation.shares_disk = False
        names = ", ".join(host.name for host in blind)
        what = f"{str(folder)!r} of host {lead.name} is not that of {names}: each host saves to its own"
        generation.all.say(f"{what}, with a copy of the shards of the host before it")
        return
    generation.rejected_by = next(iter(blind), None)
    raise_if(_not_shared(lead, host, str(folder), str(found[host]["cwd"])) for host in blind)


def _not_shared(lead: Member, host: Member, folder: str, cwd: str) -> Problem:
    what = f"host {host.name} (in {cwd}) does not see what host {lead.name} writes to {folder!r}"
    fix = "--checkpoint.memory_every 1step: hosts hold copies for each other; or --checkpoint.dir /shared/run, or a URL"
    return Problem("N069", what, fix)


@contextlib.contextmanager
def coordinating(
    hosts: Sequence[HostSpec],
    address: tuple[str, int],
    job: Job,
    *,
    key: Key | None,
    ssh: str,
    local_agent: LocalAgent,
    timeout: float,
    min_hosts: int,
) -> Iterator[Coordinator]:
    """A coordinator that listens at an address. `key` None: a fresh key, which only started agents get."""
    key_text = secrets.token_hex(32)
    secret = key.secret if key is not None else secret_of(key_text)
    try:
        listening = socket.create_server(address, backlog=512)
        store = StoreProcess.start(address[0], address[1] + 1 if address[1] else 0, secret)
    except OSError as error:
        what = f"cannot listen at {address[0]}:{address[1]} and the next port: {error.strerror or error}"
        raise ShoalError(what, fix="--listen with an address of this host and a free port", code="N060") from None
    members = Members(hosts, secret, listening, _say)
    coordinator = Coordinator(members, store, job, ssh, key_text, local_agent, timeout, min_hosts, num_used=len(hosts))
    lets_go = True
    with queueing_signals(coordinator.signals):
        try:
            yield coordinator
        except LostLead:
            lets_go = False
            raise
        except BaseException as error:
            coordinator.exit_code = exit_code_of(error)
            raise
        finally:
            coordinator.close(lets_go=lets_go)


def exit_code_of(error: BaseException) -> int:
    """The exit code of a command that ends with an error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", RUN_FAILED)
    return code if isinstance(code, int) else RUN_FAILED


def secret_of(text: str) -> bytes:
    """The secret of a key that was handed over as text."""
    return hashlib.sha256(text.encode()).digest()


def _be_agent(serve: LocalAgent, address: tuple[str, int], key: str, name: str) -> int:
    close_all_but()  # else connections of the coordinator would not end with it
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    return serve(address, key, name)


def _say(text: str) -> None:
    print(f"shoal: {text}", file=sys.stderr, flush=True)
