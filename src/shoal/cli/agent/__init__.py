"""`shoal agent --join HOST:PORT`: be the agent of this host in a run of `shoal train --hosts`."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.cli.options import parse_options
from shoal.comm.rendezvous.key import Key
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.launch.hosts.agent.runner import Work
    from shoal.launch.hosts.messages import Message

NO_COORDINATOR = 75
"""The exit code of an agent with `--exit-as-run` that has lost its coordinator, or has found none: try again."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """Join a run of `shoal train --hosts` as one of its hosts. `shoal train` starts agents by ssh. On Slurm, on
    Kubernetes and by hand this command does, with the key of the run in SHOAL_KEY or SHOAL_KEY_FILE."""

    join: str = ""
    """The address of the coordinator: HOST:PORT."""

    store: str = ""
    """In place of --join: where the coordinators of the run are found, etcd://a:2379,b:2379/NAME."""

    name: str = ""
    """The name of this host in --hosts. Empty: its host name."""

    wait: float = 60.0
    """Seconds for which to wait for a coordinator that is not started yet."""

    key_from_stdin: bool = False
    """Read the key from the first line of stdin."""

    exit_as_run: bool = False
    """End with the exit code of the run. Otherwise 0, once the run has ended."""

    json: bool = False
    """Print an error as one JSON object."""


def main(arguments: Sequence[str]) -> int:
    """Serve the coordinator; 0 when it let this agent go."""
    options = parse_options(Agent, arguments, prog="shoal agent")
    host, _, port = options.join.rpartition(":")
    if not options.store and (not host or not port.isdecimal() or int(port) > 65535):
        what = f"--join must be the coordinator's HOST:PORT, got {options.join[:80]!r}"
        raise ShoalError(what, fix="shoal agent --join 10.0.0.1:29400", code="N050")
    key = _key_of(options)
    try:
        code = _serve(options, (host, int(port or 0)), key)
    except ShoalError as error:
        if options.exit_as_run and {"N053", "N072"} & set(error.codes):
            error.exit_code = NO_COORDINATOR
        raise
    return code if options.exit_as_run else 0


def _serve(options: Agent, address: tuple[str, int], key: Key) -> int:
    """Serve the coordinator; the exit code of the run."""
    from shoal.cli.bench.on_hosts import is_of_bench, prepare_steps
    from shoal.cli.train import as_verb
    from shoal.launch.hosts.agent.join import run_agent
    from shoal.launch.hosts.etcd.client import Etcd
    from shoal.launch.hosts.etcd.leadership import Leadership

    wait = 0.0 if options.key_from_stdin else options.wait  # a coordinator that starts agents listens already
    name, verb = options.name or socket.gethostname(), as_verb()

    def prepare(order: Message) -> tuple[Message, Callable[[Message], Work]]:
        return prepare_steps(order) if is_of_bench(order) else verb.prepare(order)

    if options.store:
        from shoal.launch.hosts.agent.follow import follow

        return follow(Leadership(Etcd.at(options.store), key.secret), key, name, prepare, wait=wait)
    return run_agent(address, key, name, prepare, wait=wait)


def _key_of(options: Agent) -> Key:
    """The key from stdin, or that of the environment or the home directory."""
    from shoal.cli.agent.keys import handed_over, shared_key

    if not options.key_from_stdin:
        return shared_key()
    text = sys.stdin.readline().strip()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return handed_over(text)
