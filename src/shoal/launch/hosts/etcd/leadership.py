"""One of several coordinators leads a run: the one that has written the record of the leader in etcd last.

    leader    leader #7 ─ beat #8 ─ beat #9 ─ state #10, if leader is still #7 ─ beat #11 ─ † its host is lost
    standby   looks ─ ─ ─ looks ─ ─ looks ─ ─ looks ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ nothing has changed for TAKEOVER:
                                                                    leader #12, if leader is still #7 and beat #11
    agents    join a leader whose records change

#7 is the revision of a key: etcd gives each change a number. Each change by a leader is a transaction that compares the
revision of `leader` with that of its own record. So a leader that was asleep when another one took over can write
nothing when it wakes up, and one that lives changes its beat in time, or fails to. etcd decides, and nothing is agreed
upon here. Workers end with the lease of their agent (`hosts.lease`).

Values have a MAC of the run's key: a stranger who can write to etcd can stop the run, and cannot take part.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.comm.rendezvous.mac import TAG, mac
from shoal.errors import RunFailed, ShoalError
from shoal.launch.hosts.etcd.client import Etcd, Unreachable
from shoal.launch.hosts.lease import LEASE, TAKEOVER, boottime
from shoal.launch.hosts.messages import Message

RENEWAL = 0.5
POLL = 0.25
ANSWERING = 1.0
"""Seconds in which etcd must have answered without a pause before another coordinator takes over: while etcd elects its
own leader, no coordinator can change its beat."""
MOST_PAUSE = 1.0
"""Seconds between two answers of etcd that are no pause."""
TURN = 0.1


class LostLead(RunFailed):
    """The beat could not be changed in time, or another coordinator leads."""


@dataclass(slots=True)
class Watch:
    """The records of the leader, as one sees them who does not lead."""

    revisions: tuple[int, int] | None = None
    """Of the leader and of its beat, when they were read last."""
    has_changed: bool = False
    """Whether they were different in two readings: the leader lives, or a new one has taken over."""
    _since: float = 0.0
    _answering_since: float = 0.0
    _answered: float = float("-inf")

    def note(self, revisions: tuple[int, int]) -> None:
        """Note what was read just now."""
        now = boottime()
        if now > self._answered + MOST_PAUSE:
            self._answering_since = now
        self._answered = now
        if revisions != self.revisions:
            self.has_changed, self.revisions, self._since = self.revisions is not None, revisions, now

    @property
    def is_over(self) -> bool:
        """Whether the leader has changed nothing for so long that another coordinator may take over."""
        return self._answered > max(self._since + TAKEOVER, self._answering_since + ANSWERING)


@dataclass(slots=True)
class Leadership:
    """The records of a run in etcd, and whether this coordinator leads it."""

    etcd: Etcd
    key: bytes = field(repr=False)
    revision: int = 0
    """Of the record under which this coordinator leads; 0: it does not lead."""
    _id: str = ""
    """Of this coordinator, if it leads or tries to."""
    _renewed: float = 0.0
    _tried: float = 0.0

    def look(self, watch: Watch) -> Message | None:
        """Read the record of the coordinator that leads, and note its revision and that of its beat."""
        leader, beat = self.etcd.read(self._name("leader"), self._name("beat"))
        watch.note((leader.revision, beat.revision))
        return self._opened("leader", leader.value)

    def state(self) -> Message:
        """What the last leader has written of the run; empty: nothing."""
        return self._opened("state", self.etcd.read(self._name("state"))[0].value) or {}

    def wait_to_lead(self, address: tuple[str, int], say: Callable[[str], None], check: Callable[[], None]) -> bool:
        """Return True when this coordinator leads, False if the run has ended under another one. `check` is called
        every turn, and may raise."""
        seen, watch = "", Watch()  # the id of the last other leader: an earlier run of the same name has ended, too
        self._id = secrets.token_hex(8)
        while True:
            check()
            try:
                leader = self.look(watch)
                if leader is None and seen and self.state().get("ended_by") == seen:
                    return False
                if (leader is None or watch.is_over or leader["id"] == self._id) and self._leads(address, watch):
                    return True
                if leader is not None and not seen:
                    say(f"the coordinator at {leader['host']}:{leader['port']} leads; this one waits to take over")
                seen = seen if leader is None else str(leader["id"])
            except Unreachable as error:
                if not seen:
                    raise self._unreachable(error) from None
            time.sleep(POLL)

    def _leads(self, address: tuple[str, int], watch: Watch) -> bool:
        """Take the lead, if nothing has changed since the last look; return whether this coordinator leads."""
        assert watch.revisions is not None
        own = self._sealed("leader", {"host": address[0], "port": address[1], "id": self._id})
        names = (self._name("leader"), self._name("beat"))
        self.etcd.change({names[0]: own}, unchanged=dict(zip(names, watch.revisions, strict=True)))
        leader = self.etcd.read(names[0])[0]  # an endpoint that did not answer may have made the change, too
        self.revision = leader.revision if leader.value == own else 0
        self._renewed = self._tried = float("-inf")
        return bool(self.revision) and self.renew()

    def renew(self) -> bool:
        """Change the beat, now and then; return whether it was changed. Raises `LostLead` if that fails for too long,
        or if another coordinator leads."""
        began = boottime()
        if not self.revision or began < self._tried + RENEWAL:
            return False
        try:
            if not self._change({}):
                raise self._lost("another coordinator leads")
        except Unreachable as error:
            if boottime() > self._renewed + LEASE:
                raise self._lost(str(error)) from None
            return False
        return True

    def write(self, state: Message) -> None:
        """Write the state of the run; raises `LostLead` if another coordinator leads."""
        if not self._insist(lambda: self._replace_state(state)):
            raise self._lost("another coordinator leads")

    def end(self, *, exit_code: int | None) -> None:
        """Lead no more. `exit_code`: that of the run, which has ended; None: another coordinator is to take over."""
        if self.revision:
            with contextlib.suppress(LostLead):
                self._insist(lambda: self._replace_leader(exit_code))
            self.revision = 0

    def _insist(self, change: Callable[[], bool]) -> bool:
        """Make a change while etcd does not answer; raises `LostLead` if it does not for as long as a lease."""
        while True:
            try:
                return change()
            except Unreachable as error:
                if boottime() > self._renewed + LEASE:
                    raise self._lost(str(error)) from None
            time.sleep(TURN)

    def _replace_state(self, state: Message) -> bool:
        """Write the state; False: another coordinator leads. A state that a slow endpoint writes late must not replace
        a newer one, so the one that it replaces is compared, too."""
        value, names = self._sealed("state", state), (self._name("leader"), self._name("state"))
        while True:
            leader, known = self.etcd.read(*names)
            if leader.revision != self.revision:
                return False
            if known.value == value or self._change({names[1]: value}, {names[1]: known.revision}):
                return True

    def _replace_leader(self, exit_code: int | None) -> bool:
        """Delete the record of the leader, and with the same change write that the run has ended."""
        puts, leader = {}, self._name("leader")
        if exit_code is not None:
            ended = {**self.state(), "has_ended": True, "ended_by": self._id, "exit_code": exit_code}
            puts = {self._name("state"): self._sealed("state", ended)}
        return self.etcd.change(puts, unchanged={leader: self.revision}, deletes=[leader]) is not None

    def _change(self, puts: dict[str, bytes], unchanged: dict[str, int] | None = None) -> bool:
        """Put values and the beat; False: another coordinator leads, or what should be unchanged has changed."""
        began = boottime()
        conditions = {self._name("leader"): self.revision, **(unchanged or {})}
        if self.etcd.change({**puts, self._name("beat"): b""}, unchanged=conditions) is None:
            return False
        self._renewed = self._tried = began
        return True

    # ---- values ----------------------------------------------------------------------------------------------------

    def _name(self, what: str) -> str:
        return f"/shoal/{self.etcd.name}/{what}"

    def _sealed(self, what: str, value: Message) -> bytes:
        body = json.dumps(value).encode()
        return mac(self.key, "etcd", self._name(what), body) + body

    def _opened(self, what: str, sealed: bytes | None) -> Message | None:
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
        self.revision = 0
        what = f"this coordinator does not lead run {self.etcd.name!r} in etcd any more: {why}"
        return LostLead(what, fix="look at the hosts of etcd, and at the network to them", code="N095")

    def _unreachable(self, error: Unreachable) -> ShoalError:
        return ShoalError(str(error), fix="start etcd there, or correct --store", code="N096")
