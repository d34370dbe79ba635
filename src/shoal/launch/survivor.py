"""A worker's side of a replacement: leave the generation of a lost rank, and begin the next one in this process.

    launcher       rank 2 ends ─ "1" to each survivor ─ forks rank 2 ...
    thread                        └ waits until nothing moves, and cuts the connections [1]
    main thread    all_reduce ───── raises ─ left ─ drops groups and memory ─ function(generation 1) ─ joined ─ armed

[1] Where a connection ends while gloo's own thread answers a message, gloo loses the exception, and the main thread
    waits for its timeout (torch 2.13, seen in every fifth cut between small collectives). While all wait, it does not
    happen. The launcher replaces a rank that has not left after two seconds: all ranks load the last checkpoint anyway.

A rank is `armed` while it trains: before and after that, a lost rank means a restart of all workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from shoal.comm.group_lifetime import can_cut, cut_groups, drop_groups
from shoal.comm.heartbeat.heart import heart
from shoal.launch.failure import is_echo, is_out_of_memory

ARMED, DISARMED, JOINED, LEFT = "armed", "disarmed", "joined", "left"
END = -1
"""The order that ends a worker that lost a peer: no rank is replaced any more. Others are numbers of generations."""
WAIT_FOR_ORDER = 1.0
"""Seconds that a worker that lost a peer waits for an order. Then it ends, as without a launcher that replaces."""
QUIET, MOST_WAIT = 0.015, 0.25
"""Seconds without a new collective after which the connections are cut, and the most that are waited for that."""
SECONDS_TO_DROP = 4.0
"""Seconds that threads have to end after their connections are cut."""


class Survivor:
    """The connection of this worker to its launcher, and the generation in which it trains."""

    def __init__(self, connection: Connection, generation: int) -> None:
        self.generation = generation
        self._connection = connection
        self._next: int | None = None
        self._has_failed = False
        """Whether the main thread has left its collective already."""
        self._is_ordered = threading.Event()
        threading.Thread(target=self._listen, name="shoal-orders", daemon=True).start()

    def report(self, word: str) -> None:
        """Report a state of this generation to the launcher."""
        with suppress(OSError):
            self._connection.send_bytes(f"{word} {self.generation}".encode())

    def survives(self, error: BaseException) -> bool:
        """Whether an exception is the consequence of a lost rank that is being replaced.

        After the launcher's order any exception is one: the next generation would raise one of another cause again.
        """
        if not isinstance(error, Exception) or is_out_of_memory(error):
            return False
        if self._next is None and not is_echo(error):
            return False
        self._has_failed = True
        if (beating := heart()) is not None:
            with suppress(Exception):
                beating.beat(with_tickets=True)  # it says in which collective this rank was
        self._is_ordered.wait(WAIT_FOR_ORDER)
        return self._next is not None and self._is_ordered.is_set()

    def leave(self) -> int:
        """Drop what is left of this generation, and return the number of the next one."""
        assert self._next is not None
        self.report(LEFT)
        if (beating := heart()) is not None:
            beating.stop()
        drop_groups(SECONDS_TO_DROP)
        self.generation, self._next, self._has_failed = self._next, None, False
        self._is_ordered.clear()
        return self.generation

    def _listen(self) -> None:
        with suppress(EOFError, OSError, ValueError):
            while (order := int(self._connection.recv_bytes(16))) != END:
                self._next = order
                self._wait_until_quiet()
                cut_groups()
                self._is_ordered.set()  # last: the main thread makes new groups after it
        self._is_ordered.set()  # no order will come: end the wait for it

    def _wait_until_quiet(self) -> None:
        """[1] Wait until the main thread has failed, or enters nothing any more."""
        beating, began = heart(), time.monotonic()
        changed, last = began, None
        while beating is not None and not self._has_failed:
            now, current = time.monotonic(), beating.progress()
            if current != last:
                changed, last = now, current
            if now - changed > QUIET or now - began > MOST_WAIT:
                return
            time.sleep(QUIET / 5)


_survivor: Survivor | None = None


def become_survivor(connection: Connection | None, generation: int) -> Survivor | None:
    """Listen to the launcher; None: it replaces no rank."""
    global _survivor
    _survivor = None if connection is None else Survivor(connection, generation)
    return _survivor


def note_joined() -> None:
    """Report that this rank has joined the others."""
    if _survivor is not None:
        _survivor.report(JOINED)


@contextmanager
def armed() -> Iterator[None]:
    """Report that a lost rank can be replaced during the context; do nothing where the launcher replaces none."""
    if _survivor is None or not can_cut():
        yield
        return
    _survivor.report(ARMED)
    yield
    _survivor.report(DISARMED)  # not after an exception: it may be the consequence of a lost rank
