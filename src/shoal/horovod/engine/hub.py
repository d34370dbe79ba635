"""Both ends of the control plane: the hub on rank 0, and the client that every other rank has in its place.

    Hub (rank 0)       requests of all ranks → Coordinator → responses to all members
    Client (others)    requests → rank 0; responses from rank 0

Each calls `on_response` for what this rank has to execute, and `on_end` when a rank has left or is lost.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from shoal.horovod.engine.coordinator import Coordinator
from shoal.horovod.engine.link import Link
from shoal.horovod.engine.messages import Request, Response, decode_request, decode_response, encode

BYE, LOST = b"bye", b"lost"
DEPTH = 2
"""Responses that rank 0 executes or has next. What becomes ready meanwhile is fused into one response after it."""
STALL_SECONDS = 60.0

OnResponse = Callable[[Response], None]
OnEnd = Callable[[str, bool], None]
"""Called with how the control plane has ended, and whether a rank was lost."""


class ControlPlane(Protocol):
    """What the engine needs of a hub or a client."""

    def start(self, on_response: OnResponse, on_end: OnEnd) -> None:
        """Begin to receive."""

    def submit(self, request: Request) -> None:
        """Request a collective for this rank."""

    def executed(self, response: Response) -> None:
        """Note that this rank has executed a response."""

    def close(self, *, is_lost: bool = False) -> None:
        """Leave the other ranks."""


@dataclass(slots=True)
class Hub:
    """Rank 0's end. Whichever thread brings the last request sends the responses, under one lock."""

    coordinator: Coordinator
    links: dict[int, Link]
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _in_flight: int = 0
    _on_response: OnResponse | None = None
    _on_end: OnEnd | None = None
    _closed: threading.Event = field(default_factory=threading.Event)

    def start(self, on_response: OnResponse, on_end: OnEnd) -> None:
        """Receive from every rank, one thread for each, and watch for names that some ranks never request."""
        self._on_response, self._on_end = on_response, on_end
        for rank in self.links:
            threading.Thread(target=self._serve, args=(rank,), name=f"horovod-rank-{rank}", daemon=True).start()
        threading.Thread(target=self._watch_stalls, name="horovod-stalls", daemon=True).start()

    def submit(self, request: Request) -> None:
        """Request a collective for rank 0."""
        with self._lock:
            self.coordinator.add(0, request)
            self._dispatch()

    def executed(self, response: Response) -> None:
        """Make room for the next responses."""
        with self._lock:
            self._in_flight -= 1
            self._dispatch()

    def close(self, *, is_lost: bool = False) -> None:
        """Leave: the others get an end of their connection."""
        self._closed.set()
        for link in self.links.values():
            with suppress(OSError):
                link.send(LOST if is_lost else BYE)
            link.close()

    def _serve(self, rank: int) -> None:
        link, how = self.links[rank], "has ended without hvd.shutdown()"
        while (data := link.receive()) is not None:
            if data == BYE:
                how = "has called hvd.shutdown()"
                break
            try:
                request = decode_request(data)
            except ValueError:
                break
            with self._lock:
                self.coordinator.add(rank, request)
                self._dispatch()
        if not self._closed.is_set():
            self._left(rank, how, is_lost="without" in how)

    def _left(self, rank: int, how: str, *, is_lost: bool) -> None:
        with self._lock:
            self.coordinator.leave(rank, how)
            self._dispatch()
            if is_lost:
                for other, link in self.links.items():
                    if other not in self.coordinator.gone:
                        with suppress(OSError):
                            link.send(LOST + str(rank).encode())
        if is_lost and self._on_end is not None:
            self._on_end(f"rank {rank} {how}", True)

    def _dispatch(self) -> None:
        """Send what is ready. The lock is held, so every member sees the same order."""
        if self._in_flight >= DEPTH and not self.coordinator.has_urgent():
            return
        for response in self.coordinator.take(only_urgent=self._in_flight >= DEPTH):
            members = self.coordinator.members_of(response)
            data = encode(response) if len(members) > 1 or members != (0,) else b""
            for rank in members:
                if rank in self.links and rank not in self.coordinator.gone:
                    with suppress(OSError):  # its own thread finds out
                        self.links[rank].send(data)
            if 0 in members and self._on_response is not None:
                self._in_flight += 1
                self._on_response(response)

    def _watch_stalls(self) -> None:
        seconds = float(os.environ.get("HOROVOD_STALL_CHECK_TIME_SECONDS", STALL_SECONDS))
        last = float(os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0))
        while seconds > 0 and not self._closed.wait(min(seconds, last or seconds) / 4):
            with self._lock:
                lines = self.coordinator.stalled(seconds)
                if last > 0:
                    self.coordinator.expire(last)
                    self._dispatch()
            for line in lines:
                print(f"shoal.horovod: waiting for more than {seconds:g} s: {line}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Client:
    """The end of every other rank."""

    link: Link
    _is_closed: bool = False

    def start(self, on_response: OnResponse, on_end: OnEnd) -> None:
        """Receive responses in a thread."""

        def receive() -> None:
            how, is_lost = "rank 0 has ended without hvd.shutdown()", True
            while (data := self.link.receive()) is not None:
                if data == BYE:
                    how, is_lost = "rank 0 has called hvd.shutdown()", False
                    break
                if data.startswith(LOST):
                    how = f"rank {data[len(LOST) :].decode() or '0'} has ended without hvd.shutdown()"
                    break
                try:
                    on_response(decode_response(data))
                except ValueError:
                    break
            if not self._is_closed:
                on_end(how, is_lost)

        threading.Thread(target=receive, name="horovod-control", daemon=True).start()

    def submit(self, request: Request) -> None:
        """Send a request to rank 0."""
        with suppress(OSError):  # the receiving thread notices, and fails all that is pending
            self.link.send(encode(request))

    def executed(self, response: Response) -> None:
        """Rank 0 alone counts."""

    def close(self, *, is_lost: bool = False) -> None:
        """Leave."""
        self._is_closed = True
        if not is_lost:
            with suppress(OSError):
                self.link.send(BYE)
        self.link.close()
