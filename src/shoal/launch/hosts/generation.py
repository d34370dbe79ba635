"""One generation of a run on several hosts: prepare everywhere, start everywhere, and end everywhere.

    agents   ── prepared ─┐                 ┌─ started ── ... ── done ─────────────▶ the value of rank 0
    here     ── prepare ──┴─ compare ─ start┘
                                              one fails ─ settle ─ stop all ─ stopped ─▶ the first failure is raised

A failure of one host is reported within `SETTLE` of its decision there, and all others are stopped at once. The rule of
`launch.failure` decides which one came first: lost peers are echoes, and the loss of a host is a cause.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shoal.errors import Problem, RunFailed, ShoalError, raise_if
from shoal.launch.failure import Failure, cause_of, first_failure
from shoal.launch.hosts.members import Member, Members
from shoal.launch.hosts.messages import Message
from shoal.launch.hosts.reports import error_from, error_of, failure_from
from shoal.launch.watch.all_hosts import AllHosts
from shoal.launch.watch.hang_thresholds import Thresholds

SETTLE = 0.2
"""Seconds after the first report of a failure in which another host may report an earlier one."""
SETTLE_ON_ECHO = 2.0
"""The same, while all reports are of lost peers."""
MOST_PEERS = 16
"""Other hosts that each host tries to reach before the start."""
SECONDS_TO_STOP = 1.0
"""Seconds between SIGTERM and SIGKILL for ranks of other hosts, when one has failed."""
SECONDS_TO_END = 10.0
"""Seconds that an agent may take to report that its workers have ended, after the order to end them."""
SECONDS_TO_NOTE = 8.0
"""Seconds after which hosts that are waited for are named."""
TASKS: Mapping[str, str] = {
    "listening": "listen at a port",
    "reached": "connect to the other hosts",
    "prepared": "load the job",
    "token written": "write a file beside the checkpoints",
    "token found": "look for a file beside the checkpoints",
}
"""Report → what a host has to do before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The command of a run, for all hosts."""

    words: Sequence[str]
    """The arguments of `shoal train`."""
    recipe: str | None
    """The SHA-256 of the recipe's file; None: there is no file."""
    name: str
    """A random name of this run."""
    grace_period: float
    start_time: float
    plan_for: Callable[[int], str | None]
    """The plan for a number of ranks; None: that of the command. Raises if none fits them."""
    fits: Callable[[int], bool] = lambda num_ranks: True
    """Whether a plan fits a number of ranks. `plan_for` takes longer to say what would fit."""

    def fitting(self, hosts: Sequence[Member], least: int = 1) -> list[Member]:
        """As many of some hosts as have ranks that a plan fits, from the first one on; empty: none of them."""
        counts = range(len(hosts), least - 1, -1)
        most = next((count for count in counts if self.fits(num_ranks(hosts[:count]))), 0)
        return list(hosts[:most])

    def why_not(self, hosts: Sequence[Member]) -> str:
        """Why no plan fits the ranks of some hosts; empty: one does."""
        try:
            self.plan_for(num_ranks(hosts))
        except ShoalError as error:
            return error.problems[0].what
        return ""


class Grown(Exception):
    """The workers have saved and ended, so that a host that has come back can take part."""


@dataclass(slots=True)
class Generation:
    """The hosts of one generation, and what they have reported."""

    number: int
    all: Members
    hosts: list[Member]
    job: Job
    store: tuple[str, int]
    signals: list[int]
    """Received signals that are still to be handled."""
    revive: Callable[[], None]
    """Called in each turn: starts the agents of hosts that are missing, and records saved steps."""
    timeout: float = 600.0
    """Seconds that a host may take to load the job, and for each other order before the start."""
    shares_disk: bool = True
    """Whether all hosts see the same directory of checkpoints."""
    saved_before: int = 0
    """The newest step that earlier generations have saved; 0: none."""
    plan: str = ""
    prepared: dict[Member, Message] = field(default_factory=dict)
    done: dict[Member, Message] = field(default_factory=dict)
    failures: list[tuple[Failure, Message, Member]] = field(default_factory=list)
    stopped: set[Member] = field(default_factory=set)
    watched: AllHosts = field(default_factory=AllHosts)
    saved_step: int | None = None
    passed_on: int | None = None
    kill_at: float | None = None
    rejected_by: Member | None = None
    """The host that has rejected the job."""
    grows: bool = False
    """Whether the workers were stopped because a host has come back."""
    stopped_by: int = 0
    """The stop signal that the agent of a host has got, and has passed on to its workers; 0: none."""
    newcomers: dict[Member, bool] = field(default_factory=dict)
    """Host that has come back → whether it has loaded the job."""
    reached: dict[Member, Message] = field(default_factory=dict)
    """The reports of all hosts on their connections to each other."""
    early: dict[Member, Message] = field(default_factory=dict)
    """Host that has joined before this generation was started → its report."""

    @property
    def world_size(self) -> int:
        """The number of ranks on all hosts."""
        return num_ranks(self.hosts)

    def first_rank(self, host: Member) -> int:
        """The first rank on a host."""
        return num_ranks(self.hosts[: self.hosts.index(host)])

    def host_of(self, rank: int) -> Member:
        """The host of a rank."""
        return next(host for host in self.hosts if rank < self.first_rank(host) + host.spec.slots)

    def ranks(self, host: Member) -> str:
        """The ranks on a host, in words."""
        first, last = self.first_rank(host), self.first_rank(host) + host.spec.slots - 1
        return f"rank {first}" if first == last else f"ranks {first} to {last}"

    # ---- prepare and start -----------------------------------------------------------------------------------------

    def check_network(self) -> None:
        """Let every host connect to every other one; raises with the pairs that cannot."""
        if len(self.hosts) == 1:
            return
        ports: dict[Member, Message] = {}
        self.all.send(self.hosts, {"do": "listen", "generation": self.number})
        self.collect(ports, "listening")
        for number, host in enumerate(self.hosts):
            others = [*self.hosts[number + 1 :], *self.hosts[:number]][:MOST_PEERS]
            targets = [[f"host {each.name}", ports[each]["address"], ports[each]["port"]] for each in others]
            self.all.send([host], {"do": "reach", "targets": [["the store of the coordinator", *self.store], *targets]})
        self.collect(self.reached, "reached")
        problems = [
            Problem(
                "N066",
                f"host {host.name} cannot connect to {target}: {why}",
                "open all TCP ports between the hosts of the run; or export GLOO_SOCKET_IFNAME=<a common network>",
            )
            for host, report in self.reached.items()
            for target, why in report["failed"]
        ]
        if problems and self.number:  # another host may have been lost in this moment
            failed = RunFailed(*problems[:MOST_PEERS])
            failed.may_pass = True
            raise failed
        raise_if(problems[:MOST_PEERS])

    def prepare(self) -> None:
        """Let every host load and check the job; raises if one rejects it, or has another one."""
        for host in self.hosts:
            self.all.send([host], self.order_to_prepare(host))
        self.collect(self.prepared, "prepared")
        lead = self.prepared[self.hosts[0]]
        self.plan = str(lead["plan"])
        others = [host for host in self.hosts if self.prepared[host]["plan"] != lead["plan"]]
        for host in others:  # `plan: auto` depends on the calibration of a host; one plan has to hold on all
            del self.prepared[host]
            self.all.send([host], {**self.order_to_prepare(host), "plan": lead["plan"]})
        self.collect(self.prepared, "prepared")
        self._compare()

    def order_to_prepare(self, host: Member) -> Message:
        """The order to load and check the job."""
        return {
            "do": "prepare", "generation": self.number, "words": list(self.job.words), "recipe": self.job.recipe,
            "world_size": self.world_size, "num_local": host.spec.slots, "first_rank": self.first_rank(host),
            "plan": self.job.plan_for(self.world_size), "name": host.name,
        }  # fmt: skip

    def collect(self, found: dict[Member, Message], what: str, *, of: Sequence[Member] | None = None) -> None:
        """Wait until every host, or each of some, has reported something; raises if one takes too long."""
        began, is_noted = time.monotonic(), False
        while missing := [host for host in of or self.hosts if host not in found]:
            self._raise_on_signal()
            waited = time.monotonic() - began
            if waited > self.timeout:
                raise self._late(missing[0], what)
            if waited > SECONDS_TO_NOTE and not is_noted:
                is_noted = True
                self.all.say(f"waiting for {', '.join(host.name for host in missing)} to {TASKS[what]}")
            for host, event in self.all.turn():
                if host not in self.hosts:
                    self._note_early(host, event)
                elif event["say"] == what and event.get("generation", self.number) == self.number:
                    found[host] = event
                elif event["say"] == "rejected":
                    raise self._rejected(host, event)
                elif event["say"] in ("lost", "template ended"):
                    raise self._lost(host, str(event.get("why", "its process that loads the job was killed")))

    def _rejected(self, host: Member, event: Message) -> ShoalError:
        """A problem of the command is one of all hosts; the name of the host says where it was found first."""
        self.rejected_by = host
        return error_from(event["error"], host=host.name if len(self.hosts) > 1 else "")

    def _late(self, host: Member, what: str) -> RunFailed:
        """A host that answers, but does not do what it has to before the start: it would hang again after a restart."""
        self.rejected_by = host
        late = f"host {host.name} ({self.ranks(host)}) did not {TASKS[what]} within launch.timeout, {self.timeout:g} s"
        fix = f"look for a file system or a download that hangs there; or --launch.timeout {2 * self.timeout:g}"
        return RunFailed(late, fix=fix, code="N057")

    def _compare(self) -> None:
        lead = self.hosts[0]
        for host in self.hosts[1:]:
            for what in ("recipe", "device"):
                ours, theirs = self.prepared[lead][what], self.prepared[host][what]
                if ours != theirs:
                    self.rejected_by = host
                    raise ShoalError(
                        f"host {host.name} has another {what} than host {lead.name}: {theirs} against {ours}",
                        fix="the same files and the same devices on every host; or --launch.device cpu",
                        code="N059",
                    )

    def wait_until(self, moment: float) -> None:
        """Wait until a moment of the monotonic clock; raises if a host is lost before."""
        while time.monotonic() < moment:
            self._raise_on_signal()
            for host, event in self.all.turn(min(0.1, max(0.0, moment - time.monotonic()))):
                self._note_early(host, event)
                if host in self.hosts and event["say"] == "lost":
                    raise self._lost(host, str(event["why"]))

    def _note_early(self, host: Member, event: Message) -> None:
        """Note a host that takes part as soon as this generation has started."""
        if host not in self.hosts and event["say"] == "joined":
            self.early[host] = event

    def start(self) -> None:
        """Let every host start its workers."""
        self.all.shows_plain, self.all.has_begun = self.hosts[0], True
        for node, host in enumerate(self.hosts):
            order = {
                "do": "start", "generation": self.number, "first_rank": self.first_rank(host), "node": node,
                "num_local": host.spec.slots, "world_size": self.world_size, "store": list(self.store),
                "job": self.job.name, "age": time.time() - self.job.start_time,
                "saved_before": self.saved_before, "host": host.name, "shares_disk": self.shares_disk,
                "peers": peers_of(host, self.reached),
            }  # fmt: skip
            self.all.send([host], order)

    # ---- watch -----------------------------------------------------------------------------------------------------

    def watch(self) -> Any:
        """Return the value of rank 0 when all hosts are done; raises the first failure."""
        first_seen: float | None = None
        for host, event in self.early.items():
            if host.is_here:
                welcome_back(self, host, event)
        while len(self.done) < len(self.hosts):
            for host, event in self.all.turn():
                self._note(host, event)
                welcome_back(self, host, event)
            judge(self)
            self.revive()
            self._pass_on_signals()
            if self.failures:
                first_seen = first_seen or time.monotonic()
                candidate = first_failure(failure for failure, _, _ in self.failures)
                if time.monotonic() > first_seen + (SETTLE_ON_ECHO if candidate.is_echo else SETTLE):
                    # Before the others are stopped, which is a signal to their workers, too.
                    number = self.passed_on or self.stopped_by or (0 if self.grows else self._killed_by)
                    # Ranks that wait for a lost host in a collective act on no SIGTERM.
                    self.stop_all(0.0 if candidate.code == "N057" else SECONDS_TO_STOP)
                    outcome = self._outcome()
                    if not number or not getattr(outcome, "may_pass", False):
                        raise outcome
                    self.all.say(f"{outcome}\n  not restarted: the run was being stopped")
                    raise interruption(number)
        if self._killed_by:
            if self.grows:  # they took too long to save: all continue from the last checkpoint
                raise Grown
            raise interruption(self._killed_by)
        value = self.done[self.hosts[0]]["value"]
        if self.grows and value["was_stopped"]:
            raise Grown
        return value

    @property
    def _killed_by(self) -> int:
        """The signal that has killed the workers of a host before their last save; 0: none has."""
        return next((int(event["signal"]) for event in self.done.values() if event["outcome"] == "killed"), 0)

    def _note(self, host: Member, event: Message) -> None:
        if host not in self.hosts or event.get("generation", self.number) != self.number:
            return
        if event.get("saved_step") is not None:
            self.saved_step = max(self.saved_step or 0, int(event["saved_step"]))
        self.watched.note(host.name, event)
        if event["say"] == "failed" or event.get("outcome") == "failed":
            failure = failure_from(event["failure"])
            if all(known.rank != failure.rank for known, _, _ in self.failures):
                self.failures.append((failure, event, host))
        elif event["say"] == "ended":
            self.done[host] = event
        elif event["say"] == "signaled":  # the run ends with its last save, also if that was made to let a host in
            self.grows, self.stopped_by = False, int(event["number"])
        elif event["say"] in ("stopped", "joined"):  # an agent ends its workers before it joins again
            self.stopped.add(host)
        elif event["say"] in ("lost", "runner ended", "template ended") and host not in self.done:
            why = str(event.get("why", "its processes were killed"))
            self.failures.append((self._loss(host, why), {}, host))

    def _loss(self, host: Member, why: str) -> Failure:
        what = f"host {host.name} ({self.ranks(host)}) is lost: {why}"
        rank = self.first_rank(host)
        return Failure(code="N057", rank=rank, at=time.monotonic(), what=what, is_sudden=True, may_pass=True)

    def _lost(self, host: Member, why: str) -> RunFailed:
        failed = RunFailed(self._loss(host, why).what, code="N057")
        failed.may_pass = True
        return failed

    def stop_all(self, seconds: float) -> None:
        """End the workers of all hosts; return when they have ended, or their hosts are lost."""
        self.all.send(self.hosts, {"do": "stop", "seconds": seconds})
        deadline = time.monotonic() + seconds + SECONDS_TO_END
        while any(host.is_here and host not in self.stopped for host in self.hosts):
            for host, event in self.all.turn():
                self._note(host, event)
            if time.monotonic() > deadline:
                for host in self.hosts:
                    if host.is_here and host not in self.stopped:
                        self.all.lose(host, "its workers do not end")

    def _outcome(self) -> ShoalError:
        """The error of the first failure."""
        first = first_failure(failure for failure, _, _ in self.failures)
        cause = self.watched.explained(first, num_ranks=self.world_size, timeout=self.timeout)
        report = next(report for failure, report, _ in self.failures if failure is first)
        is_raised = report.get("error") and cause is first
        place = f"rank {cause.rank} of {self.world_size} (host {self.host_of(cause.rank).name})"
        error = error_from(report["error"]) if is_raised else error_of(cause, place=place)
        if isinstance(error, RunFailed):
            error.saved_step, error.plan = self.saved_step, self.plan
            error.cause = cause_of(cause)
        return error

    # ---- signals ---------------------------------------------------------------------------------------------------

    def _raise_on_signal(self) -> None:
        if self.signals:
            number = self.signals.pop(0)
            raise interruption(number)

    def _pass_on_signals(self) -> None:
        if self.signals:
            number = self.signals.pop(0)
            was_stopped, self.grows = self.grows, False
            if self.passed_on is not None:  # a second signal kills
                self.stop_all(0.0)
                raise interruption(number)
            self.passed_on, self.kill_at = number, time.monotonic() + self.job.grace_period + 5.0
            if not was_stopped:  # workers that already save to let a host in would be killed by a second signal
                self.all.send(self.hosts, {"do": "signal", "number": number})
        if self.kill_at is not None and time.monotonic() > self.kill_at and self.passed_on is not None:
            self.stop_all(0.0)
            raise interruption(self.passed_on)


def judge(generation: Generation) -> None:
    """Let the host of a rank for which others wait look at it, and end it if it has not moved since."""
    waiting = [host.name for host in generation.hosts if host not in generation.done]
    if found := generation.watched.verdict(waiting, Thresholds(generation.timeout)):
        order = {"do": "judge", "generation": generation.number, "verdict": asdict(found)}
        generation.all.send([generation.host_of(found.rank)], order)


def num_ranks(hosts: Sequence[Member]) -> int:
    """The number of ranks on some hosts."""
    return sum(host.spec.slots for host in hosts)


def peers_of(host: Member, reached: Mapping[Member, Message]) -> Message | None:
    """From where ranks of other hosts connect to one, by the reports of all; None: not all of them have tried."""
    used = [report["used"].get(f"host {host.name}") for each, report in reached.items() if each is not host]
    if not used or None in used:
        return None
    addresses = {address for report in reached.values() for address in report["addresses"]}
    return {"used": sorted(set(used)), "addresses": sorted(addresses)}


def interruption(number: int) -> BaseException:
    """What a signal raises that ends the run before its last save."""
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def welcome_back(generation: Generation, host: Member, event: Message) -> None:
    """Let hosts that have come back load the job. Then all save, and the next generation is one with these hosts."""
    hosts, newcomers, job, members = generation.hosts, generation.newcomers, generation.job, generation.all
    report = event["say"]
    if host in hosts or generation.passed_on is not None or generation.stopped_by:
        return
    if report in ("joined", "lost", "rejected"):
        newcomers.pop(host, None)
    if report == "rejected":
        host.is_left_out = True
        error = error_from(event["error"], host=host.name)
        members.say(f"{error}\n  host {host.name} is left out until its agent joins again")
    elif report == "prepared":
        newcomers[host] = True
    least = len(hosts) if generation.shares_disk else len(members.usable)
    larger = job.fitting(members.usable, least)
    if num_ranks(larger) <= generation.world_size:
        if report == "joined":
            members.say(f"host {host.name} is back, and waits for others: {job.why_not(members.usable)}")
        return
    wider = replace(generation, hosts=larger)
    for each in larger:
        if each not in hosts and each not in newcomers:
            newcomers[each] = False
            members.send([each], wider.order_to_prepare(each))
    if not generation.grows and all(each in hosts or newcomers[each] for each in larger):
        generation.grows = True
        names = [each.name for each in larger if each not in hosts]
        back = f"host {names[0]} is back" if len(names) == 1 else f"hosts {', '.join(names)} are back"
        members.say(f"{back}: saving, to continue on {len(larger)} hosts")
        members.send(hosts, {"do": "signal", "number": int(signal.SIGTERM)})
