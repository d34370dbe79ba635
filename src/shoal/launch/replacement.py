"""Replace one lost worker while the others live on.

    rank 2      † killed, or ended by the launcher because it hangs
    launcher      ├ may it be replaced? [1] ── order to leave [2] ── fork of rank 2 [3] ─ all joined ─ all armed: done
    others        waiting ──────────────────── left [4] ─ drop groups ─ function(next generation) ─ join ─ load ─ train

[1] One rank alone, of workers that all train, lost without an exception of its own, and within the budget of restarts.
[2] The order is the number of the next generation. It has its own folder: store, boards, heartbeats.
[3] The fork does not wait for the others: they connect through the store.
[4] A rank that does not leave in time is ended and replaced, too: all ranks load the last checkpoint anyway. If the
    ranks do not come together, or another one is lost before all train again, all workers are ended. The caller
    restarts all of them then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

from shoal.errors import RunFailed, ShoalError, listed
from shoal.launch.failure import Failure
from shoal.launch.survivor import ARMED, DISARMED, END, JOINED, LEFT

SECONDS_TO_LEAVE = 2.0
"""Seconds that the others have to leave their step. A long forward, or an exception that gloo lost, holds them up."""
SECONDS_TO_JOIN = 10.0
"""Seconds from there to the new group of all ranks. What comes after it, like loading, has the usual limits."""
SECONDS_TO_IMPORT = 50.0
"""Seconds that a new process has to import torch, where it is not forked."""


class Budget(Protocol):
    """Decides whether a run restarts after a failure; `shoal.elastic.restart.RestartBudget`."""

    generation: int

    def take(self, error: RunFailed) -> bool:
        """Whether there is another restart; counts it."""

    def report_replacement(self, error: RunFailed, ranks: str) -> None:
        """Report and note a failure after which some ranks are replaced."""


@dataclass(slots=True)
class Replacement:
    """The connections to all workers, and the replacement in progress."""

    budget: Budget
    seconds_to_join: float = SECONDS_TO_JOIN
    links: dict[int, Connection] = field(default_factory=dict)
    """Rank → the launcher's end of its connection."""
    lost: Failure | None = None
    """The failure of the rank that is being replaced; None: there is none."""
    late: set[int] = field(default_factory=set)
    """Further ranks that are replaced, since they did not leave in time."""
    ending: set[int] = field(default_factory=set)
    """Those of them whose process has not ended yet."""
    is_over: bool = False
    """Whether a failure means a restart of all workers from now on."""
    _describe: Callable[[], ShoalError] | None = None
    """The error of the lost rank, to be reported once the others have left."""
    _states: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Rank → its last report, and the generation of that."""
    _deadline: float = 0.0

    @property
    def generation(self) -> int:
        """The number of restarts so far."""
        return self.budget.generation

    def connect(self, rank: int, context: Any) -> Connection:
        """A new connection to a worker that is about to start; returns the worker's end."""
        if rank in self.links:
            self.links[rank].close()
        self.links[rank], of_worker = context.Pipe()
        self._states.pop(rank, None)
        return of_worker  # type: ignore[no-any-return]

    def why_not(self, failure: Failure, others: Sequence[int]) -> str:
        """Why a failure means a restart of all workers; empty: its rank can be replaced."""
        self._read_all()
        if self.lost is not None:
            return f"rank {failure.rank} was lost while rank {self.lost.rank} was being replaced"
        if not failure.is_lost:
            return "the cause is not the process alone"
        idle = [rank for rank in others if self._states.get(rank) != (ARMED, self.generation)]
        return f"rank {idle[0]} is not in training" if idle else ""

    def allows(self, error: ShoalError) -> bool:
        """Whether the budget allows another restart; counts it, and with it the generation."""
        return isinstance(error, RunFailed) and self.budget.take(error)

    def begin(self, failure: Failure, others: Sequence[int], describe: Callable[[], ShoalError]) -> None:
        """[2] Order the others to leave. `describe` the failure when they have: they know where they waited."""
        self.lost, self._describe = failure, describe
        self.late, self.ending = set(), set()
        self._deadline = time.monotonic() + SECONDS_TO_LEAVE
        for rank in others:
            self._order(rank, self.generation)

    def give_up(self, why: str) -> None:
        """From now on, a failure means a restart of all workers; say why, if a rank was lost alone."""
        if not self.is_over:
            for rank in self.links:
                self._order(rank, END)  # those that lost a peer wait for it
        self.is_over = True
        if why:
            print(f"shoal: no rank is replaced: {why}", file=sys.stderr, flush=True)

    def _order(self, rank: int, order: int) -> None:
        with suppress(OSError):  # it has just ended, which is seen next
            self.links[rank].send_bytes(str(order).encode())

    def ranks_to_end(self, ranks: Sequence[int]) -> list[int]:
        """[4] The ranks that have not left in time, each once."""
        if self.lost is None or self._describe is None or time.monotonic() < self._deadline:
            return []
        self._read_all()
        found = [rank for rank in ranks if rank not in {self.lost.rank, *self.late} and not self._has_left(rank)]
        self.late.update(found)
        self.ending.update(found)
        return found

    def look(self, ranks: Sequence[int]) -> str:
        """Follow the replacement in progress; returns why it has failed, or nothing."""
        self._read_all()
        if self.lost is None:
            return ""
        if all(rank in {self.lost.rank, *self.late} or self._has_left(rank) for rank in ranks):
            self._report()
        waiting = [rank for rank in ranks if not self._is_in(rank, JOINED, ARMED, DISARMED)]
        if not waiting or time.monotonic() < self._deadline + self.seconds_to_join:
            return ""
        return f"the ranks had not come together after {self.seconds_to_join:g} s"

    def _report(self) -> None:
        """Report the replacement, once all others have left."""
        if self._describe is None or self.lost is None:
            return
        error, self._describe = self._describe(), None
        if isinstance(error, RunFailed):
            ranks = listed(sorted({self.lost.rank, *self.late})).replace(" or ", " and ")
            self.budget.report_replacement(error, f"rank{'s' if self.late else ''} {ranks}")

    @property
    def is_joining(self) -> bool:
        """Whether ranks are still on their way to the next generation: nothing can be said of their counters."""
        return self.lost is not None and not all(self._is_in(rank, JOINED, ARMED, DISARMED) for rank in self.links)

    def _read_all(self) -> None:
        """Read all reports that have arrived. When all ranks train again, the replacement is over."""
        for rank, link in self.links.items():
            with suppress(EOFError, OSError):
                while link.poll():
                    word, _, generation = link.recv_bytes(64).decode().partition(" ")
                    self._states[rank] = word, int(generation)
        if self.lost is not None and all(self._is_in(rank, ARMED, DISARMED) for rank in self.links):
            self._report()
            self.lost = None

    def close(self) -> None:
        """Close all connections."""
        for link in self.links.values():
            link.close()
        self.links.clear()

    def _has_left(self, rank: int) -> bool:
        word, generation = self._states.get(rank, ("", -1))
        return generation == self.generation or (word, generation) == (LEFT, self.generation - 1)

    def _is_in(self, rank: int, *words: str) -> bool:
        word, generation = self._states.get(rank, ("", -1))
        return generation == self.generation and word in words
