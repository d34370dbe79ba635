"""Serve the coordinator that leads a run in etcd, and the next one when it is lost."""

from __future__ import annotations

import sys
import time

from shoal.comm.rendezvous.key import Key
from shoal.errors import ShoalError
from shoal.launch.hosts.agent.join import SECONDS_TO_REJOIN, join, serve, serving
from shoal.launch.hosts.agent.loop import Silent
from shoal.launch.hosts.agent.template import Prepare
from shoal.launch.hosts.etcd.client import Unreachable
from shoal.launch.hosts.etcd.leadership import POLL, Leadership, Watch
from shoal.launch.hosts.lease import Lease
from shoal.launch.hosts.messages import Channel, Ended

RETRY = 2.0
"""Seconds until an address that did not answer is tried again: the next leader may be recorded meanwhile."""


def follow(leadership: Leadership, key: Key, name: str, prepare: Prepare, *, wait: float) -> int:
    """Serve one coordinator after the other until one lets this agent go; the exit code."""
    with serving(key, prepare) as agent:
        found = _joined(leadership, key, name, wait)
        while not isinstance(found, int):
            agent.lease = Lease()
            try:
                return serve(agent, found)
            except (Silent, Ended):
                agent.lose_coordinator()
                _say("the coordinator is lost; the workers here were ended")
                found = _joined(leadership, key, name, SECONDS_TO_REJOIN, may_end=True)
        _say("the run has ended")
        return found


def _joined(leadership: Leadership, key: Key, name: str, seconds: float, *, may_end: bool = False) -> Channel | int:
    """Join the coordinator that leads, as soon as there is one; or return the exit code of the run, which has ended.

    A record that does not change may be that of a lost leader: to connect there would take seconds."""
    deadline, why = time.monotonic() + seconds, ""
    is_noted = False
    failed: tuple[tuple[str, int] | None, float] = None, 0.0
    watch = Watch()
    while True:
        address = None
        try:
            leader = leadership.look(watch)
            if leader is not None and watch.has_changed:
                address = str(leader["host"]), int(leader["port"])
            if address is not None and (address != failed[0] or time.monotonic() > failed[1] + RETRY):
                return join(address, key, name, seconds=0.0)
            if may_end and (state := leadership.state()).get("has_ended"):
                return int(state.get("exit_code", 0))
        except Unreachable as error:
            why = str(error)
        except ShoalError as error:
            if not {"N053", "N072"} & set(error.codes):
                raise
            failed = address, time.monotonic()
        if time.monotonic() > deadline:
            what = f"no coordinator leads run {leadership.etcd.name!r} after {seconds:g} s{why and f': {why}'}"
            fix = "on any host: shoal train RECIPE --hosts ... --ssh none --store URL, with the same URL and SHOAL_KEY"
            raise ShoalError(what, fix=fix, code="N098")
        if not is_noted:
            is_noted = True
            _say(f"waiting for a coordinator of run {leadership.etcd.name!r}")
        time.sleep(POLL)


def _say(text: str) -> None:
    print(f"shoal agent: {text}", file=sys.stderr, flush=True)
