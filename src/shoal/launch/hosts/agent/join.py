"""Connect an agent to its coordinator, and again after the network between them was cut."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from shoal.comm.rendezvous.key import Key
from shoal.errors import ShoalError
from shoal.launch.hosts.agent.loop import Agent, Silent
from shoal.launch.hosts.agent.template import Prepare
from shoal.launch.hosts.lease import boottime
from shoal.launch.hosts.messages import Channel, Ended, WrongKey, prove
from shoal.launch.hosts.versions import facts
from shoal.launch.stop_signals import STOP_SIGNALS

SECONDS_TO_CONNECT = 6.0
SECONDS_TO_REJOIN = 600.0
"""Seconds in which an agent without workers tries to reach its coordinator again."""


def run_agent(
    address: tuple[str, int], key: Key, name: str, prepare: Prepare, *, wait: float = SECONDS_TO_CONNECT
) -> int:
    """Serve the coordinator at an address until it lets this agent go; the exit code. `wait`: seconds in which it may
    be started."""
    with serving(key, prepare) as agent:
        channel = join(address, key, name, wait=wait)
        while True:
            try:
                return serve(agent, channel)
            except (Silent, Ended):
                agent.lose_coordinator()
                _say(f"the connection to the coordinator at {_shown(address)} is lost; the workers here were ended")
                channel = _rejoin(address, key, name)


@contextlib.contextmanager
def serving(key: Key, prepare: Prepare) -> Iterator[Agent]:
    """An agent that passes signals on to its workers, and ends them in the end."""
    agent = Agent(key.secret, prepare)

    def enqueue(number: int, frame: FrameType | None) -> None:
        if agent.runner is None:  # nothing to save
            raise SystemExit(128 + number)
        agent.signals.append(number)

    for number in STOP_SIGNALS:
        signal.signal(number, enqueue)
    try:
        yield agent
    finally:
        agent.close()


def serve(agent: Agent, channel: Channel) -> int:
    """Serve a coordinator until it lets the agent go; the exit code of the run. Raises `Silent` or `Ended` if it is
    lost."""
    agent.serve(channel)
    if agent.sent_away is not None:
        raise agent.sent_away
    return agent.run_code


def join(
    address: tuple[str, int], key: Key, name: str, seconds: float = SECONDS_TO_CONNECT, *, wait: float = 0.0
) -> Channel:
    """Connect, authenticate both sides, and introduce this host. `wait`: seconds in which nothing may listen there."""
    began = time.monotonic()
    deadline, is_noted = began + seconds, False
    while True:
        try:
            channel = _authenticated(address, key, timeout=max(1.0, deadline - time.monotonic()))
            channel.send({"say": "hello", "name": name, "at": boottime(), **facts()})
            return channel
        except WrongKey as error:
            raise ShoalError(
                f"the coordinator at {_shown(address)} and this host hold different keys: {error};"
                f" this host has the key of {key.source}",
                fix="the same SHOAL_KEY here and at the coordinator; or copy its ~/.config/shoal/key to this host",
                code="N052",
            ) from None
        except ConnectionRefusedError:
            if time.monotonic() + 0.3 > began + (wait or seconds):
                raise _nothing_listens(address, name, time.monotonic() - began) from None
            if wait and not is_noted:
                is_noted = True
                _say(f"waiting {wait:g} s for a coordinator at {_shown(address)}: nothing listens there yet")
            time.sleep(0.2)
        except (OSError, Ended) as error:
            # A coordinator that has just been started, or that is flooded with connections, is tried again.
            if time.monotonic() + 0.3 > deadline or isinstance(error, socket.gaierror):
                raise _unreachable(address, error, name) from None
            time.sleep(0.2)


def _authenticated(address: tuple[str, int], key: Key, timeout: float) -> Channel:
    connection = socket.create_connection(address, timeout=timeout)
    try:
        connection.settimeout(SECONDS_TO_CONNECT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return prove(connection, key.secret)
    except BaseException:
        connection.close()
        raise


def _rejoin(address: tuple[str, int], key: Key, name: str) -> Channel:
    deadline = time.monotonic() + SECONDS_TO_REJOIN
    while True:
        try:
            return join(address, key, name, seconds=0.0)
        except ShoalError as error:
            if "N053" not in error.codes or time.monotonic() > deadline:  # N072: its host answers, and it has ended
                raise
            time.sleep(0.3)


def _nothing_listens(address: tuple[str, int], name: str, waited: float) -> ShoalError:
    return ShoalError(
        f"nothing listens at {_shown(address)}: host {name} found no coordinator there in {waited:.0f} s",
        fix=f"on {address[0]}: shoal train RECIPE --hosts {name}:N,... --ssh none --listen {_shown(address)}",
        code="N072",
    )


def _unreachable(address: tuple[str, int], error: Exception, name: str) -> ShoalError:
    text = getattr(error, "strerror", None) or str(error)
    return ShoalError(
        f"host {name} cannot connect to the coordinator at {_shown(address)}: {text}",
        fix=f"open port {address[1]} and the next one on the coordinator's host (--listen ADDRESS:PORT fixes them), or"
        f" --listen another address of it; to try: `nc -vz {address[0]} {address[1]}` on {name}",
        code="N053",
    )


def _shown(address: tuple[Any, ...]) -> str:
    return f"{address[0]}:{address[1]}"


def _say(text: str) -> None:
    print(f"shoal agent: {text}", file=sys.stderr, flush=True)
