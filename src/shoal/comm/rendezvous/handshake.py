"""Handshake: every rank proves that it holds the key of the run before a process group is created.

The ranks share only a store, to which any process on the network can write. Rank 0 and rank r exchange five values
there. The key itself is never sent, and both sides add a fresh random number. So no value of an earlier run, of an
earlier generation or of another rank is accepted:

    [1] rank 0  challenge  n0
    [2] rank r  hello r    nr, MAC(key, run, r, n0, nr)             rank r holds the key, and answers this challenge
    [3] rank 0  answer r   seed, MAC(key, run, r, n0, nr, seed)     rank 0 holds the key, and has accepted every rank
    [4] rank r  proof r    MAC(session, r)                          rank r has the session key, MAC(key, run, seed)
    [5] rank 0  done       MAC(session, "done")                     rank 0 has the proof of every rank

`run` is the world size, the generation, the number of the world, the port of the store and the launcher's name of the
job.

[6] A value with a wrong MAC is erased, and its rank writes it again. So one wrong value has no effect, and a process
    that keeps writing them ends the run with a message, as a rank with another key does.
[7] Rank 0 writes `done` once and leaves. A rank also leaves when its proof has not changed for `GRACE_PERIOD`: rank 0
    has read it by then.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from shoal.comm.rendezvous.key import MAKE_ONE, Key
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.comm.rendezvous.mac import TAG, mac
from shoal.errors import ShoalError

GRACE_PERIOD = 3.0  # seconds in which a correct value may replace a wrong one
PAUSE = 1.0  # seconds without a wrong value, after which earlier ones do not count
LINGER = 4.0  # seconds in which rank 0 repeats to the others that it has rejected a rank
LATE = timedelta(seconds=1)
SWEEP = 0.25  # seconds between two reads of each value, while some are missing
NONCE = 32
ACCEPTED, REJECTED = b"\1", b"\0"


def agree(store: dist.Store, place: Placement, key: Key, *, run: str, timeout: float) -> bytes:
    """Return a session key, fresh each time, that only ranks with the key of the run have. Raises on every rank if one
    of them does not have the key."""
    store.set_timeout(LATE)
    handshake = _Handshake(store, place, key, run, deadline=time.monotonic() + timeout, timeout=timeout)
    return handshake.as_main() if place.rank == 0 else handshake.as_other()


@dataclass(slots=True)
class _Handshake:
    """The handshake, seen from one rank."""

    store: dist.Store
    place: Placement
    key: Key
    run: str
    deadline: float
    timeout: float
    bad: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Rank → times of the first and the last wrong value for it, in a series without a long pause."""
    next_sweep: float = 0.0

    def as_main(self) -> bytes:
        """Challenge the other ranks, and accept those that answer."""
        others = range(1, self.place.world_size)
        for rank in others:
            for what in ("hello", "answer", "proof"):
                self._erase(f"{what} {rank}")  # values of an earlier generation or of another process
        n0, seed = secrets.token_bytes(NONCE), secrets.token_bytes(NONCE)
        self._write("challenge", n0)  # [1]
        nonces = self._hellos(others, n0)  # [2]
        answers = {
            f"answer {rank}": content + mac(self.key.secret, "answer", self.run, rank, n0, nonces[rank], content)
            for rank in others
            for content in [ACCEPTED + seed]
        }
        session = mac(self.key.secret, "session", self.run, seed)
        self._publish(answers)  # [3] only now: the answer says that every rank was accepted
        self._proofs(others, session, answers)  # [4]
        self._write("done", mac(session, "done"))  # [5]
        return session

    def _hellos(self, others: Sequence[int], n0: bytes) -> dict[int, bytes]:
        nonces: dict[int, bytes] = {}
        for _ in self._polls():
            for rank, value in self._arrived("hello", [rank for rank in others if rank not in nonces]):
                nonce = value[:NONCE]
                if hmac.compare_digest(value[NONCE:], mac(self.key.secret, "hello", self.run, rank, n0, nonce)):
                    nonces[rank] = nonce
                elif self._is_persistent(rank, f"hello {rank}"):  # [6]
                    self._reject(rank, others, n0)
            if len(nonces) == len(others):
                return nonces
            if self._is_over:
                raise self._missing([rank for rank in others if rank not in nonces])
            self._restore("challenge", n0)  # another process may have overwritten it
        raise AssertionError

    def _proofs(self, others: Sequence[int], session: bytes, answers: dict[str, bytes]) -> None:
        proven: set[int] = set()
        for _ in self._polls():
            for rank, value in self._arrived("proof", [rank for rank in others if rank not in proven]):
                if hmac.compare_digest(value, mac(session, "proof", rank)):
                    proven.add(rank)
                elif self._is_persistent(rank, f"proof {rank}"):
                    raise self._rejected(rank)
            if len(proven) == len(others):
                return
            if self._is_over:
                raise self._missing([rank for rank in others if rank not in proven])
            self._publish({f"answer {rank}": answers[f"answer {rank}"] for rank in others if rank not in proven})

    def as_other(self) -> bytes:
        """Answer the challenge, and authenticate rank 0."""
        rank, nonce, secret = self.place.rank, secrets.token_bytes(NONCE), self.key.secret
        try:
            for _ in self._polls():
                challenge = self._peek("challenge")
                if challenge is not None:
                    tag = mac(secret, "hello", self.run, rank, challenge, nonce)
                    self._restore(f"hello {rank}", nonce + tag)  # [2] of the challenge that is there now
                    answer = self._peek(f"answer {rank}") or b""
                    content, tag = answer[:-TAG], answer[-TAG:]
                    # [3] with this rank's own nonce: rank 0 holds the key, and this is no answer of an earlier run
                    fits = hmac.compare_digest(tag, mac(secret, "answer", self.run, rank, challenge, nonce, content))
                    if fits and content[:1] == ACCEPTED:
                        session = mac(secret, "session", self.run, content[1:])
                        self._prove(session)  # [4]
                        return session
                    if fits:
                        raise self._rejected(json.loads(content[1:]))
                    if answer and self._is_persistent(0, f"answer {rank}"):
                        raise self._rejected(0)
                if self._is_over:
                    raise self._missing([0])
        except (dist.DistNetworkError, dist.DistStoreError) as error:  # rank 0, which serves the store, has exited
            if self.bad:
                raise self._rejected(0) from error
            raise
        raise AssertionError

    def _prove(self, session: bytes) -> None:
        """Write the proof, again if another process overwrites it, until rank 0 has read it."""
        name, proof, done = f"proof {self.place.rank}", mac(session, "proof", self.place.rank), mac(session, "done")
        unchanged_since = time.monotonic()
        for _ in self._polls():
            if hmac.compare_digest(self._peek("done") or b"", done) or self._is_over:  # [5]
                return
            if self._peek(name) != proof:
                self._write(name, proof)
                unchanged_since = time.monotonic()
            elif time.monotonic() - unchanged_since > GRACE_PERIOD:  # [7]
                return

    # ---- the store -------------------------------------------------------------------------------------------------

    def _polls(self) -> Iterator[None]:
        """Poll at once, and then less and less often."""
        pause, slowest = 0.0005, max(0.004, 0.0005 * self.place.world_size)
        while True:
            yield
            time.sleep(pause)
            pause = min(1.5 * pause, slowest)

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def _peek(self, name: str) -> bytes | None:
        """Return a value, or None. A process that deletes it between the two calls costs `LATE`."""
        if not self.store.check([name]):
            return None
        try:
            return bytes(self.store.get(name)) or None
        except dist.DistStoreError:
            return None

    def _erase(self, name: str) -> None:
        """Write an empty value; a deleted key would make others wait for it."""
        if self.store.check([name]):
            self._write(name, b"")

    def _restore(self, name: str, value: bytes) -> None:
        """Write a value again if another process has deleted or changed it."""
        if self._peek(name) != value:
            self._write(name, value)

    def _write(self, name: str, value: bytes) -> None:
        self.store.set(name, value)  # type: ignore[arg-type]  # it takes bytes too

    def _publish(self, values: dict[str, bytes]) -> None:
        for name, value in values.items():
            self._restore(name, value)

    def _arrived(self, what: str, ranks: list[int]) -> Iterator[tuple[int, bytes]]:
        """Yield the values that these ranks have written. Every `SWEEP` look at each; else only at all of them at
        once."""
        now = time.monotonic()
        if now < self.next_sweep and not self.store.check([f"{what} {rank}" for rank in ranks]):
            return
        self.next_sweep = now + SWEEP
        for rank in ranks:
            if (value := self._peek(f"{what} {rank}")) is not None:
                yield rank, value

    def _is_persistent(self, rank: int, name: str) -> bool:
        """Erase a wrong value; return whether wrong ones have arrived for too long."""
        self._erase(name)
        now = time.monotonic()
        first, last = self.bad.get(rank, (now, now))
        self.bad[rank] = (now if now - last > PAUSE else first, now)
        return now - self.bad[rank][0] > GRACE_PERIOD

    # ---- failures --------------------------------------------------------------------------------------------------

    def _reject(self, rejected: int, others: Sequence[int], n0: bytes) -> None:
        """Report the rejected rank to the others, authenticated with each one's fresh number; raise."""
        content, until = REJECTED + json.dumps(rejected).encode(), time.monotonic() + LINGER
        while time.monotonic() < until:
            for rank in others:
                hello = self._peek(f"hello {rank}") or bytes(NONCE)
                tag = mac(self.key.secret, "answer", self.run, rank, n0, hello[:NONCE], content)
                self._restore(f"answer {rank}", content + tag)
            time.sleep(0.05)
        raise self._rejected(rejected)

    def _rejected(self, rank: int) -> ShoalError:
        me, host = self.place.rank, socket.gethostname()
        if rank == 0:
            what = (
                f"rank {me} and rank 0 do not hold the same key, or a process that is not part of the run answers in"
                f" place of rank 0; rank {me} on {host} has the key of {self.key.source}"
            )
        else:
            what = (
                f"rank {rank} was rejected: it did not prove that it holds the key of this run, which rank {me} on"
                f" {host} has from {self.key.source}. It has another key, or it is not part of the run"
            )
        return ShoalError(
            what, fix=f"one key on every host: {MAKE_ONE}; or copy {self.key.source} to every host", code="N005"
        )

    def _missing(self, ranks: Sequence[int]) -> ShoalError:
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{' ...' if len(ranks) > 8 else ''}"
        where = f"{self.place.master_addr}:{self.place.master_port}"
        return ShoalError(
            f"rank {self.place.rank} of {self.place.world_size} waited {self.timeout:g} s for {who} at {where}",
            fix="start all ranks, and export MASTER_ADDR=<an address of rank 0's host that every rank can reach>",
            code="N006",
        )
