"""`shoal launch node`: be one machine of a job whose scheduler starts one command on each machine.

    machine 0     shoal launch node ─┬─ shoal train --hosts node-0:8,node-1:8 --ssh none   the coordinator
                                     └─ shoal agent --name node-0
    machine 1     shoal launch node ─── shoal agent --name node-1

All of them end with the exit code of the run, so that the scheduler can start all of them again.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import tyro

from shoal.cli.agent import NO_COORDINATOR
from shoal.cli.overrides import parse, settings_as_words
from shoal.errors import RUN_FAILED, Problem, RunFailed
from shoal.jobs.spec import MOST_NODES, MOST_PER_NODE
from shoal.launch.stop_signals import STOP_SIGNALS

SECONDS_TO_LEAVE = 20.0
"""Seconds that the agent of machine 0 has to end after its coordinator."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """Be one machine of several: start the ranks of this one, and on the first one also the coordinator of the run.
    Kubernetes, SkyPilot and dstack start this command on each machine. Settings of the recipe may follow.

    shoal launch node recipe.yaml --nodes 2 --rank 0 --master 10.0.0.1 --slots 8
    """

    recipe: Annotated[Path | None, tyro.conf.Positional] = None
    """A YAML file."""

    nodes: int = 1
    """Machines of the job."""

    rank: int = 0
    """The number of this machine, from 0."""

    master: str = "127.0.0.1"
    """The name or address of machine 0, which all others reach."""

    port: int = 29400
    """The port of the coordinator on machine 0; the next one is used, too."""

    slots: int = 1
    """Ranks on each machine."""

    wait: float = 600.0
    """Seconds for which to wait for the first machine."""

    json: bool = False
    """Print an error as one JSON object."""


def main(arguments: Sequence[str]) -> int:
    """Run this machine's part; the exit code of the run."""
    options, reading = parse(Node, arguments, prog="shoal launch node")
    reading.with_problems(_check(options)).complete()
    words = [str(options.recipe), *settings_as_words(Node, arguments)]
    with _passing_signals() as children:
        address = _address_of(options.master, options.wait)
        if options.rank > 0:
            return _follow(options, children)
        children.append(_start("train", *words, *_hosts(options, address)))
        return _watch(options, children[0])


def _follow(options: Node, children: list[subprocess.Popen[bytes]]) -> int:
    """Be the agent of another machine than the first. If that one is lost, wait for the one in its place, once."""
    for _ in range(2):
        children[:] = [_start(*_agent(options))]
        code = _ended(children[0])
        if code != NO_COORDINATOR:
            return code
    return RUN_FAILED


def _watch(options: Node, coordinator: subprocess.Popen[bytes]) -> int:
    """Wait for the coordinator, and start the agent of this machine again if it is killed."""
    agent = _start(*_agent(options))
    while coordinator.poll() is None:
        if agent.poll() is not None:
            time.sleep(1.0)
            if coordinator.poll() is None:
                agent = _start(*_agent(options))
        time.sleep(0.1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        agent.wait(SECONDS_TO_LEAVE)
    agent.kill()
    agent.wait()
    return _ended(coordinator)


def _hosts(options: Node, address: str) -> Iterator[str]:
    """The words of the coordinator."""
    hosts = ",".join(f"node-{number}:{options.slots}" for number in range(options.nodes))
    yield from ("--hosts", hosts, "--ssh", "none", "--listen", f"{address}:{options.port}")


def _agent(options: Node) -> Iterator[str]:
    yield from ("agent", "--join", f"{options.master}:{options.port}", "--name", f"node-{options.rank}")
    yield from ("--wait", f"{options.wait:g}", "--exit-as-run")


def _start(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "shoal", *words], start_new_session=True)


def _ended(process: subprocess.Popen[bytes]) -> int:
    code = process.wait()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _passing_signals() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Pass signals on to the first child of the list: the coordinator or, on other machines, the agent."""
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if not children:
            raise SystemExit(128 + number)
        children[0].send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    try:
        yield children
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            child.kill()  # of an error here; a child that has ended is left alone
            child.wait()


def _address_of(name: str, seconds: float) -> str:
    """The address of machine 0. Its name may be unknown until it has started."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
        except OSError as error:
            if time.monotonic() > deadline:
                what = (
                    f"the name {name[:80]!r} of machine 0 has no address after {seconds:g} s: {error.strerror or error}"
                )
                raise RunFailed(what, fix="--master ADDRESS; or look whether machine 0 runs", code="J030") from None
        time.sleep(1.0)


def _check(options: Node) -> Iterator[Problem]:
    if options.recipe is None:
        yield Problem("R054", "shoal launch node needs RECIPE", "shoal launch node recipe.yaml")
    for name, least, most in (("nodes", 1, MOST_NODES), ("slots", 1, MOST_PER_NODE), ("port", 1, 65534)):
        value = getattr(options, name)
        if not least <= value <= most:
            yield Problem("J001", f"--{name} must be {least} to {most}, got {value}", f"--{name} {max(least, 1)}")
    if not 0 <= options.rank < options.nodes:
        what = f"--rank must be 0 to {options.nodes - 1}, below --nodes {options.nodes}, got {options.rank}"
        yield Problem("J031", what, "--rank with the number of this machine, from 0")
