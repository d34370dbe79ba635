"""The agent of one host: it obeys the coordinator, and ends its workers when the coordinator is gone.

    coordinator ── orders ──▶ agent ── orders ──▶ template ── forks ──▶ runner ── forks ──▶ workers
                ◀─ reports ──       ◀──────────── reports ─────────────┘

The agent loads no torch and waits for nothing but its selector, so a missing heartbeat means a lost host or network.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.errors import ShoalError
from shoal.launch.hosts.agent import token_file
from shoal.launch.hosts.agent.probe import Probe
from shoal.launch.hosts.agent.template import Prepare, serve_orders
from shoal.launch.hosts.lease import AGENT_BEAT, Lease, boottime
from shoal.launch.hosts.lifetime import Orphans, forked
from shoal.launch.hosts.messages import BEAT, MOST, Channel, Message
from shoal.launch.hosts.reports import error_from

TURN = 0.2
SECONDS_TO_END = 5.0
"""Seconds that killed workers may take to end before this host joins again."""
MOST_OUTPUT = 2**16
PATIENCE = 600.0
"""Seconds for which the coordinator may be stopped (Ctrl-Z) while its host answers. A dead one closes its socket."""
MOST_READ = 16
"""Pieces of output that are relayed in one turn, so that a flood of output does not delay heartbeats."""
MOST_UNSENT = 2**20
"""Unsent bytes from which output is not read any more, until the coordinator has read some."""


class Silent(Exception):
    """The host of the coordinator does not answer, or another coordinator may lead."""


@dataclass(slots=True)
class Runner:
    """The running workers of one generation."""

    generation: int
    pid: int = 0
    """0: not started yet."""
    handle: int | None = None
    """A pidfd, which becomes readable when the runner ends."""
    kill_at: float | None = None
    has_reported: bool = False
    is_stopping: bool = False
    """Whether a stop signal was passed on to it."""
    num_own: int = 0
    """Stop signals that this process has got for it."""
    waiting: list[int] = field(default_factory=list)
    """Signals for it from the time before its start was reported."""

    def stop(self, number: int, *, is_own: bool) -> None:
        """Pass a stop signal on: the runner lets the workers save, and kills them at a second one.

        A scheduler signals all processes of a job. So the order of the coordinator and the first signal of this process
        (`is_own`) are one request. The workers save at SIGHUP as at SIGTERM, but a host on which `nohup` has started
        the agent has no handler for it.
        """
        self.num_own += is_own
        if not self.is_stopping or (is_own and self.num_own > 1):
            self.send(signal.SIGTERM if number == signal.SIGHUP else number)
        self.is_stopping = True

    def send(self, number: int) -> None:
        """Send a signal, or note it until the start is reported."""
        if not self.pid:
            self.waiting.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@dataclass(slots=True)
class Agent:
    """The agent of one host, with its template and its runner."""

    key: bytes = field(repr=False)
    prepare: Prepare
    channel: Channel | None = None
    link: socket.socket | None = None
    """To the template; None: it is not started."""
    template: int = 0
    orphans: Orphans | None = None
    """The workers of a runner that has ended; None: no template was started."""
    outputs: dict[int, int] = field(default_factory=dict)
    """Descriptor of the output of template and workers → 1 for stdout, 2 for stderr."""
    runner: Runner | None = None
    probe: Probe = field(default_factory=Probe)
    lease: Lease | None = None
    """From the coordinator, if another one may take over; None: there is no other one."""
    signals: list[int] = field(default_factory=list)
    is_done: bool = False
    sent_away: ShoalError | None = None
    """Why the coordinator has sent this agent away; None: it has not, or the run has ended."""
    run_code: int = 0
    """The exit code of the run that has ended."""

    def serve(self, channel: Channel) -> None:
        """Obey until the coordinator lets this agent go; raises `Ended` or `Silent`."""
        self.channel = channel
        last_turn = time.monotonic()
        next_beat = last_turn + BEAT  # an unread one would cut off the answer of a coordinator that closes at once
        while not self.is_done:
            now = time.monotonic()
            stalled = now - last_turn if now - last_turn > 1.0 else 0.0  # this process was stopped, or got no processor
            last_turn = now
            if channel.silence(stalled, PATIENCE) or self._has_lost_lease:
                raise Silent
            if now >= next_beat:
                next_beat = now + (BEAT if self.lease is None else AGENT_BEAT)
                channel.send({"say": "beat", "at": boottime()})
            self._turn()

    @property
    def _may_run(self) -> bool:
        """Whether workers may run here: no other coordinator can have started some."""
        return self.lease is None or self.lease.is_valid

    @property
    def _has_lost_lease(self) -> bool:
        if self.lease is None:
            return False
        return self.lease.is_over if self.runner is None else not self.lease.is_valid

    def _turn(self) -> None:
        assert self.channel is not None
        with selectors.DefaultSelector() as selector:
            write = selectors.EVENT_WRITE if self.channel.num_unsent else 0
            selector.register(self.channel.socket, selectors.EVENT_READ | write)
            for source in self._sources():
                selector.register(source, selectors.EVENT_READ)
            for each in self.probe.sources():
                is_listening = each is self.probe.listening
                selector.register(each, selectors.EVENT_READ if is_listening else selectors.EVENT_WRITE)
            ready: set[object] = {key.fileobj for key, _ in selector.select(TURN)}
        self.channel.flush()
        for output in [each for each in self.outputs if each in ready]:
            self._relay(output)
        if self.link is not None and self.link in ready:
            self._hear_template()
        if self.channel.socket in ready:
            for order in self.channel.read():
                self._obey(order)
        self._watch_runner()
        if report := self.probe.turn(ready):
            self.channel.send(report)
        while self.signals and self.runner is not None:  # else it has ended just now, and the next one gets the signal
            number = self.signals.pop(0)
            self.runner.stop(number, is_own=True)
            self.channel.send({"say": "signaled", "generation": self.runner.generation, "number": number})

    def _sources(self) -> list[Any]:
        handle = [] if self.runner is None or self.runner.handle is None else [self.runner.handle]
        outputs = [] if self._is_congested else list(self.outputs)
        return [*outputs, *([] if self.link is None else [self.link]), *handle]

    @property
    def _is_congested(self) -> bool:
        return self.channel is not None and self.channel.num_unsent > MOST_UNSENT

    def _obey(self, order: Message) -> None:
        assert self.channel is not None
        kind = order.get("do")
        if kind == "listen":
            self.channel.send(self.probe.listen(str(self.channel.socket.getsockname()[0]), int(order["generation"])))
        elif kind == "reach":
            self.probe.reach(order["targets"])
        elif kind == "prepare":
            self.probe.close()
            self._end_runner()
            self._to_template(order)
        elif kind in token_file.ORDERS:
            self._to_template(order)
        elif kind == "leads" and self.lease is not None:
            self.lease.confirm(float(order["at"]))
        elif kind == "start":
            if not self._may_run:  # the order of a coordinator that was asleep
                raise Silent
            self.runner = Runner(int(order["generation"]))
            self._to_template({**order, "peers": _peers(self, order)})
        elif kind == "stop":
            self._stop(float(order["seconds"]))
        elif kind == "signal" and self.runner is not None:
            self.runner.stop(int(order["number"]), is_own=False)
        elif kind == "judge" and self.runner is not None and order["generation"] == self.runner.generation:
            if self.link is not None:
                self._to_template(order)
        elif kind == "leave":
            self.is_done = True
            self.sent_away = error_from(order["error"]) if "error" in order else None
            self.run_code = int(order.get("code", 0))

    def _to_template(self, order: Message) -> None:
        if self.link is None:
            self._start_template()
        assert self.link is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_hear_template` reports that it has ended
            self.link.send(json.dumps(order).encode())

    def _start_template(self) -> None:
        self.orphans = self.orphans or Orphans()
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipes = {number: os.pipe() for number in (1, 2)}
        self.template = forked(partial(self._be_template, theirs, pipes))
        theirs.close()
        for number, (read, write) in pipes.items():
            os.close(write)
            os.set_blocking(read, False)
            self.outputs[read] = number

    def _be_template(self, link: socket.socket, pipes: dict[int, tuple[int, int]]) -> int:
        for number, (read, write) in pipes.items():
            os.dup2(write, number)
            os.close(read)
            os.close(write)
        assert self.channel is not None
        assert self.link is not None
        self.channel.socket.close()  # else the connection would not end with the agent
        self.link.close()
        return serve_orders(link, self.prepare, self.key)

    def _hear_template(self) -> None:
        assert self.link is not None
        assert self.channel is not None
        data = self.link.recv(MOST)
        if not data:
            self._template_ended()
            return
        report = json.loads(data)
        if report["say"] == "started":
            self._note_start(report)
            return
        if report["say"] in ("saved", "stall"):
            self.channel.send(report)
            return
        if self.runner is not None and report["generation"] == self.runner.generation:
            self.runner.has_reported = True
        for output in list(self.outputs):  # printed before the report was made
            self._relay(output)
        self.channel.send(report)

    def _template_ended(self) -> None:
        """Report that the template was killed, and forget it: the next order starts another."""
        assert self.link is not None
        assert self.channel is not None
        for output in list(self.outputs):
            self._relay(output)
            self._close_output(output)
        self.link.close()
        self.link = None
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.template, 0)
        if self.runner is not None and not self.runner.pid:  # it will not be started
            self._forget_runner()
        self.channel.send({"say": "template ended"})

    def _note_start(self, report: Message) -> None:
        pid = int(report["pid"])
        if self.runner is None or report["generation"] != self.runner.generation:  # nothing would ever end it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        self.runner.pid = pid
        with contextlib.suppress(ProcessLookupError):
            self.runner.handle = os.pidfd_open(pid)
        if self.runner.kill_at is not None:  # stopped before it was started
            self.runner.send(signal.SIGKILL)
        for number in self.runner.waiting:
            self.runner.send(number)

    def _relay(self, output: int) -> None:
        """Send what template and workers have printed."""
        assert self.channel is not None
        with contextlib.suppress(BlockingIOError):
            for _ in range(MOST_READ):
                data = os.read(output, MOST_OUTPUT)
                if not data:
                    self._close_output(output)
                    return
                text = data.decode(errors="replace")
                self.channel.send({"say": "output", "stream": self.outputs[output], "text": text})

    def _close_output(self, output: int) -> None:
        if self.outputs.pop(output, None) is not None:
            os.close(output)

    # ---- the runner ------------------------------------------------------------------------------------------------

    def _stop(self, seconds: float) -> None:
        """End the workers within some seconds; `_watch_runner` reports when they have."""
        assert self.channel is not None
        if self.runner is None:
            self.channel.send({"say": "stopped"})
            return
        if self.runner.kill_at is None:
            self.runner.send(signal.SIGTERM)
        self.runner.kill_at = time.monotonic() + seconds

    def _watch_runner(self) -> None:
        runner = self.runner
        if runner is None or self.channel is None:
            return
        if runner.kill_at is not None and time.monotonic() >= runner.kill_at:
            runner.send(signal.SIGKILL)
        if runner.pid and not _is_alive(runner) and self._have_workers_ended():
            for output in list(self.outputs):
                self._relay(output)
            if not runner.has_reported and runner.kill_at is None:
                self.channel.send({"say": "runner ended", "generation": runner.generation})
            self._forget_runner()
            self.channel.send({"say": "stopped", "generation": runner.generation})

    def _end_runner(self) -> None:
        """Kill the workers, and wait until they have ended. If their start was ordered, but is not reported yet, the
        template ends with them."""
        if self.runner is None:
            return
        self.runner.send(signal.SIGKILL)
        if not self.runner.pid:
            self._end_template()
        deadline = time.monotonic() + SECONDS_TO_END
        while _is_alive(self.runner) or not self._have_workers_ended():
            if time.monotonic() > deadline:
                print("shoal agent: killed workers do not end on this host", file=sys.stderr, flush=True)
                break
            time.sleep(0.002)
        self._forget_runner()

    def _have_workers_ended(self) -> bool:
        """Whether all that a runner which has ended has left is ended, too. Its lifeline needs workers that can run."""
        return self.orphans is None or self.orphans.end(but=self.template)

    def _forget_runner(self) -> None:
        if self.runner is not None and self.runner.handle is not None:
            os.close(self.runner.handle)
        self.runner = None

    def close(self) -> None:
        """End the workers and the template, wait until they have ended, and close the connection."""
        self._end_runner()
        self._end_template()
        if self.channel is not None:
            self.channel.close()

    def _end_template(self) -> None:
        """Kill the template, and with it the workers that it has started."""
        if self.link is not None:
            self.link.close()
            self.link = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.template, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.template, 0)
        for output in list(self.outputs):
            self._close_output(output)

    def lose_coordinator(self) -> None:
        """End the workers: another generation may start without this host."""
        self._end_runner()
        self.probe.close()
        if self.channel is not None:
            self.channel.reset()
            self.channel = None


def _is_alive(runner: Runner) -> bool:
    """Whether the runner runs. Its parent, the template, reaps it later, so a pidfd shows it."""
    if runner.handle is None:
        return False
    with selectors.DefaultSelector() as selector:
        selector.register(runner.handle, selectors.EVENT_READ)
        return not selector.select(0)


def _peers(agent: Agent, order: Message) -> Message | None:
    """From where ranks of other hosts connect to those of this one; None: unknown, and this was reported."""
    assert agent.channel is not None
    if order["num_local"] == order["world_size"]:
        return None
    peers, why = agent.probe.peers(order["peers"])
    if peers is None:
        text = f"shoal: every address may connect to ranks of this host: {why}\n"
        agent.channel.send({"say": "output", "stream": 2, "text": text})
        return None
    return {"addresses": list(peers.addresses), "own": peers.own}
