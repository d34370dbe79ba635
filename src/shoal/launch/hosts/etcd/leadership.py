"""One of several coordinators leads a run: the one that holds a lease in etcd.

    leader      lease ── renew ── renew ── † its host is lost
    standby     waits ── waits ── waits ─────── the lease has expired ── leads: reads generation, plan and saved step
    agents      find the address of the leader in etcd, and join the next one when it is lost

etcd decides who holds the lease; nothing is agreed upon here. A leader that cannot renew it stops before it expires,
by its own clock. So there is never a second one, also if the network is cut between them. Values have a MAC of the
run's key: a stranger who can write to etcd can stop the run from moving, and cannot take part.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.comm.rendezvous.mac import TAG, mac
from shoal.errors import RunFailed, ShoalError
from shoal.launch.hosts.etcd.client import Etcd, Unreachable
from shoal.launch.hosts.messages import Message

TTL = 6
"""Seconds of a lease: after so long without its leader, another coordinator takes over."""
RENEWAL = 0.5
PATIENCE = 3.5
"""Seconds without a renewal after which a leader stops: more than etcd takes to elect its own leader. The rest of
`TTL` is for a last call to three endpoints, and for the end of the workers."""
POLL = 0.25


class LostLead(RunFailed):
    """The lease could not be renewed: another coordinator may lead."""


@dataclass(slots=True)
class Leadership:
    """The records of a run in etcd, and the lease of this coordinator if it has one."""

    etcd: Etcd
    key: bytes = field(repr=False)
    lease: str = ""
    _own: bytes = b""
    """The value under which this coordinator leads."""
    _renewed: float = 0.0
    _tried: float = 0.0

    def address(self) -> tuple[str, int] | None:
        """The address of the coordinator that leads; None: there is none."""
        found = self._read("leader")
        return None if found is None else (str(found["host"]), int(found["port"]))

    def state(self) -> Message:
        """What the last leader has written of the run; empty: nothing."""
        return self._read("state") or {}

    def wait_to_lead(self, address: tuple[str, int], say: Callable[[str], None], check: Callable[[], None]) -> bool:
        """Return True when this coordinator leads, False if the run has ended under another one. `check` is called
        every turn, and may raise."""
        seen = ""  # the lease of the last other leader: an earlier run of the same name has ended, too
        while True:
            check()
            try:
                leader = self._read("leader")
                if leader is None and seen and self.state().get("ended_by") == seen:
                    return False
                if leader is None and self._takes_lead(address):
                    return True
                if leader is not None and not seen:
                    say(f"the coordinator at {leader['host']}:{leader['port']} leads; this one waits to take over")
                seen = seen if leader is None else str(leader["lease"])
            except Unreachable as error:
                if not seen:
                    raise self._unreachable(error) from None
            time.sleep(POLL)

    def _takes_lead(self, address: tuple[str, int]) -> bool:
        if self.etcd.get(self._name("leader")) is not None:
            return False
        began = time.monotonic()
        lease = self.etcd.grant(TTL)
        own = self._sealed("leader", {"host": address[0], "port": address[1], "lease": lease})
        if not self.etcd.put_if_absent(self._name("leader"), own, lease):
            self.etcd.revoke(lease)
            return False
        self.lease, self._own, self._renewed, self._tried = lease, own, began, began
        return True

    def renew(self) -> None:
        """Renew the lease, now and then; raises `LostLead` if that fails for too long."""
        now = time.monotonic()
        if not self.lease or now < self._tried + RENEWAL:
            return
        self._tried = now
        try:
            if self.etcd.renew(self.lease):
                self._renewed = now
                return
            why, is_lost = "its lease has expired", True
        except Unreachable as error:
            why, is_lost = str(error), time.monotonic() > self._renewed + PATIENCE
        if is_lost:
            self.lease = ""
            raise self._lost(why)

    def write(self, state: Message) -> None:
        """Write the state of the run; raises `LostLead` if another coordinator leads."""
        try:
            is_written = self.etcd.put_if(
                self._name("state"), self._sealed("state", state), other=self._name("leader"), has=self._own
            )
        except Unreachable as error:
            raise self._lost(str(error)) from None
        if not is_written:
            raise self._lost("another coordinator leads")

    def end(self, *, has_ended: bool) -> None:
        """Give the lease back. `has_ended`: the run has ended, and no other coordinator is to take over."""
        if self.lease:
            with contextlib.suppress(Unreachable, LostLead):
                if has_ended:
                    self.write({**self.state(), "has_ended": True, "ended_by": self.lease})
                self.etcd.revoke(self.lease)
            self.lease = ""

    # ---- values ----------------------------------------------------------------------------------------------------

    def _name(self, what: str) -> str:
        return f"/shoal/{self.etcd.name}/{what}"

    def _sealed(self, what: str, value: Message) -> bytes:
        body = json.dumps(value).encode()
        return mac(self.key, "etcd", self._name(what), body) + body

    def _read(self, what: str) -> Message | None:
        sealed = self.etcd.get(self._name(what))
        if sealed is None:
            return None
        tag, body = sealed[:TAG], sealed[TAG:]
        if not hmac.compare_digest(tag, mac(self.key, "etcd", self._name(what), body)):
            raise ShoalError(
                f"the record {self._name(what)!r} in etcd was not written with the key of this host",
                fix="the same SHOAL_KEY on all hosts; or another name of the run: --store etcd://.../NAME",
                code="N094",
            )
        value: Message = json.loads(body)
        return value

    def _lost(self, why: str) -> LostLead:
        what = f"this coordinator does not lead run {self.etcd.name!r} in etcd any more: {why}"
        return LostLead(what, fix="look at the hosts of etcd, and at the network to them", code="N095")

    def _unreachable(self, error: Unreachable) -> ShoalError:
        return ShoalError(str(error), fix="start etcd there, or correct --store", code="N096")
