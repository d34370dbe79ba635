"""Authenticated messages between the coordinator and an agent: JSON, with a MAC and a number each.

    [1] coordinator  MAGIC, n0                          32 fresh random bytes
    [2] agent        na, MAC(key, "agent", n0, na)      the agent holds the key, and answers this challenge
    [3] coordinator  MAC(key, "coordinator", n0, na)    so does the coordinator
    [4] both         length, MAC(session key of this direction, number, body), body

A party without the key is cut off after [2], before anything is parsed. A message that is changed, repeated, left out
or sent back has a wrong MAC: its number or its direction differs. Nothing is encrypted, and no secret is sent.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import secrets
import socket
import struct
import termios
import time
from dataclasses import dataclass, field
from typing import Any

from shoal.comm.rendezvous.mac import TAG, mac

MAGIC = b"shoal agents 1\n"
NONCE = 32
REJECTED = bytes(TAG)
"""Sent in place of [3] to a peer with another key, so that a connection that only breaks does not look like one."""
CHALLENGE = len(MAGIC) + NONCE
PROOF = NONCE + TAG
MOST = 2**20
"""Bytes of the body of a message."""
MOST_QUEUED = 2**24
"""Bytes that wait to be sent; a peer that reads nothing for so long is lost."""
SECONDS_TO_PROVE = 5.0
BEAT = 0.5
"""Seconds between two heartbeats."""
SILENCE = 3.0
"""Seconds in which the other host acknowledges no packet, after which it is lost."""
PROCESS_SILENCE = 30.0
"""Seconds without a message of a process whose host acknowledges packets: it is stopped, or gets no processor."""

MOST_PROBES = 3
"""Probes without an answer after which a host with a closed window is not taken for a living one."""

Message = dict[str, Any]


class Ended(Exception):
    """The peer has closed the connection, or has broken the rules of it."""


class WrongKey(Ended):
    """The peer did not prove that it holds the key."""


@dataclass(slots=True)
class Channel:
    """A connection with an authenticated peer. It never blocks."""

    socket: socket.socket
    sends_with: bytes = field(repr=False)
    reads_with: bytes = field(repr=False)
    last_read: float = field(default_factory=time.monotonic)
    """When the peer was heard last."""
    last_acked: float = field(default_factory=time.monotonic)
    """When its host had last acknowledged something, or all that was sent."""
    _num_written: int = 0
    """Bytes that were given to the kernel."""
    _num_acked: int = 0
    """Bytes that the other host has acknowledged."""
    _sent: int = 0
    _read: int = 0
    _outgoing: bytearray = field(default_factory=bytearray)
    _incoming: bytearray = field(default_factory=bytearray)

    def send(self, message: Message) -> None:
        """Queue a message, and send what the connection takes."""
        body = json.dumps(message).encode()
        assert len(body) <= MOST, f"a message of {len(body)} bytes"
        self._outgoing += len(body).to_bytes(4, "big") + mac(self.sends_with, self._sent, body) + body
        self._sent += 1
        self.flush()
        if len(self._outgoing) > MOST_QUEUED:
            raise Ended("it reads nothing")

    def silence(self, stalled: float = 0.0, patience: float = PROCESS_SILENCE) -> str:
        """Why the peer counts as lost; empty: it does not. `stalled`: seconds for which this process did not run.
        `patience`: seconds without a message, while the host answers.

        The kernel of a host acknowledges packets also while its processes get no processor. So a host that is only busy
        is not taken for a lost one, and a lost one is noticed long before TCP gives up.
        """
        now = time.monotonic()
        self.last_read = min(now, self.last_read + stalled)
        self.last_acked = min(now, self.last_acked + stalled)
        unacknowledged = self._unacknowledged
        num_acked, self._num_acked = self._num_acked, self._num_written - unacknowledged
        if not unacknowledged or self._num_acked > num_acked:
            self.last_acked = now
        else:
            self.last_acked = max(self.last_acked, now - _seconds_without_answer(self.socket))
        if now - self.last_acked > SILENCE:
            return f"its host has not answered for {SILENCE:g} s"
        if now - self.last_read > patience:
            return f"its host answers, but its agent has said nothing for {patience:g} s"
        return ""

    @property
    def _unacknowledged(self) -> int:
        """Bytes that were sent and that the other host has not acknowledged."""
        found = fcntl.ioctl(self.socket.fileno(), termios.TIOCOUTQ, bytes(4))
        return int(struct.unpack("i", found)[0])

    @property
    def num_unsent(self) -> int:
        """Bytes that `flush` has to send."""
        return len(self._outgoing)

    def flush(self) -> None:
        """Send what the connection takes now."""
        try:
            while self._outgoing:
                written = self.socket.send(self._outgoing)
                self._num_written += written
                del self._outgoing[:written]
        except BlockingIOError:
            pass
        except OSError as error:
            raise Ended(str(error)) from None

    def read(self) -> list[Message]:
        """Return the messages that have arrived; raises `Ended` when the connection has ended."""
        try:
            data = self.socket.recv(2**18)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Ended(str(error)) from None
        if not data:
            raise Ended("it closed the connection")
        self._incoming += data
        return self._parsed()

    def _parsed(self) -> list[Message]:
        messages = []
        while len(self._incoming) >= 4:
            size = int.from_bytes(self._incoming[:4], "big")
            if size > MOST:
                raise Ended(f"a message must have at most {MOST} bytes, got {size}")
            if len(self._incoming) < 4 + TAG + size:
                break
            tag, body = bytes(self._incoming[4 : 4 + TAG]), bytes(self._incoming[4 + TAG : 4 + TAG + size])
            if not hmac.compare_digest(tag, mac(self.reads_with, self._read, body)):
                raise Ended("a message was changed or repeated on its way")
            del self._incoming[: 4 + TAG + size]
            self._read += 1
            message = json.loads(body)
            if not isinstance(message, dict):
                raise Ended("a message must be a JSON object")
            messages.append(message)
            self.last_read = time.monotonic()
        return messages

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.socket.close()

    def reset(self) -> None:
        """Close the connection to a peer that does not answer. An ordinary end waits behind what was not acknowledged;
        a reset is sent at once, and arrives if packets are lost on the way back alone."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()


@dataclass(slots=True)
class Stranger:
    """A connection whose peer has not proven anything yet. It may send `PROOF` bytes within `SECONDS_TO_PROVE`."""

    socket: socket.socket
    address: str
    key: bytes = field(repr=False)
    deadline: float = field(default_factory=lambda: time.monotonic() + SECONDS_TO_PROVE)
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE))
    _proof: bytearray = field(default_factory=bytearray)

    @property
    def has_spoken(self) -> bool:
        """Whether it has sent anything. A host that only tries whether it can connect sends nothing."""
        return bool(self._proof)

    def greet(self) -> None:
        """Send the challenge [1]."""
        self._send(MAGIC + self.challenge)

    def read(self) -> Channel | None:
        """Return a channel once the proof [2] is complete and right; raises `Ended` if it is wrong."""
        try:
            data = self.socket.recv(PROOF - len(self._proof))
        except BlockingIOError:
            return None
        except OSError as error:
            raise Ended(str(error)) from None
        if not data:
            raise Ended("it closed the connection")
        self._proof += data
        if len(self._proof) < PROOF:
            return None
        nonce, tag = bytes(self._proof[:NONCE]), bytes(self._proof[NONCE:])
        if not hmac.compare_digest(tag, mac(self.key, "agent", self.challenge, nonce)):
            with contextlib.suppress(Ended):
                self._send(REJECTED)
            raise WrongKey("it does not hold the key of this run")
        self._send(mac(self.key, "coordinator", self.challenge, nonce))  # [3]
        ours, theirs = _session_keys(self.key, self.challenge, nonce)
        return Channel(self.socket, sends_with=ours, reads_with=theirs)

    def _send(self, data: bytes) -> None:
        try:
            if self.socket.send(data) != len(data):
                raise Ended("it reads nothing")
        except OSError as error:
            raise Ended(str(error)) from None


def prove(connection: socket.socket, key: bytes) -> Channel:
    """Authenticate to a coordinator over a new connection with a timeout; `WrongKey` if it holds another key."""
    try:
        greeting = read_exactly(connection, CHALLENGE)
        if not greeting.startswith(MAGIC):
            raise Ended("no coordinator of this version of shoal answers there")
        challenge, nonce = greeting[len(MAGIC) :], secrets.token_bytes(NONCE)
        connection.sendall(nonce + mac(key, "agent", challenge, nonce))
        answer = read_exactly(connection, TAG)
    except OSError as error:
        raise Ended(str(error)) from None
    if answer == REJECTED:
        raise WrongKey("the coordinator rejected the key")
    if not hmac.compare_digest(answer, mac(key, "coordinator", challenge, nonce)):
        raise WrongKey("a process with another key answers there")
    connection.setblocking(False)
    theirs, ours = _session_keys(key, challenge, nonce)
    return Channel(connection, sends_with=ours, reads_with=theirs)


def _session_keys(key: bytes, challenge: bytes, nonce: bytes) -> tuple[bytes, bytes]:
    """The keys for messages of the coordinator, and of the agent."""
    session = mac(key, "agent session", challenge, nonce)
    return mac(session, "coordinator"), mac(session, "agent")


def _seconds_without_answer(connection: socket.socket) -> float:
    """Seconds since the other host has answered with any packet; 0 while it says that its process reads nothing.

    A host whose process does not read closes its window. Then nothing is under way, and the kernel sends
    probes, at growing intervals, to find out whether it has opened.
    """
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64)
    except OSError:  # a socket of another kind
        return float("inf")
    probes, under_way, last_answer = info[3], *(struct.unpack_from("I", info, offset)[0] for offset in (24, 56))
    return 0.0 if not under_way and probes < MOST_PROBES else last_answer / 1000


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """Read a number of bytes; raises `Ended` if the connection ends before."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise Ended("it closed the connection")
        data += part
    return data
