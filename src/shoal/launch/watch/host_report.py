"""What the launcher of one host reports of its ranks to the coordinator, so that ranks of other hosts can be compared.

    host a       ... no rank moves for 1 s ─ stall ──── stall ──── stall ─▶ coordinator: one verdict over all ranks
    host b       ... no rank moves for 1 s ── stall ──── stall ──── stall ─▶     │
    host b       ◀─────────── a verdict on one of its ranks: it looks again ─────┘

Nothing is sent while ranks make progress. Times are ages, which each host measures on its own clock: clocks of two
hosts differ. Beats do not change in a stall, so they are sent once, and then only ages and the states of processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.comm.heartbeat.brief import only_pending, without_channels
from shoal.launch.watch.reading import ProcessState, Reading

STALL = 1.0
"""Seconds without progress of any rank of a host from which it reports. Ranks are named after two at least."""
EVERY, GROWTH, MOST = 0.4, 0.1, 2.0
"""Least seconds between two reports, the part of the stall if that is longer, and most seconds."""
MOST_BEATS = 3 * 2**15
"""Bytes of the beats in a report. It travels in one packet of a Unix socket (`hosts.reports`)."""
_SENT = ("counters", "phase", "step", "median", "tickets", "uses_gpu", "is_partial")
"""The parts of a beat that are sent for each rank. Groups are sent once for all of them."""

Message = dict[str, Any]


@dataclass(slots=True)
class StallReporter:
    """Reports a stall of this host, and its end."""

    send: Callable[[Message], None]
    _sent: Message | None = None
    """The beats that the coordinator has; None: it knows of no stall."""
    _next: float = 0.0

    def look(
        self, clock: float, beats: Mapping[int, dict[str, Any]], now: Mapping[int, tuple[Reading, ProcessState]]
    ) -> None:
        """Report if it is time to. `beats`, `now`: of all running ranks of this host; `clock`: that of the watcher."""
        still = min((reading.still for reading, _ in now.values()), default=0.0)
        if still < STALL:
            if self._sent is not None:
                self._sent, self._next = None, 0.0
                self.send({"say": "stall", "now": []})
        elif clock >= self._next:
            self._next = clock + min(max(EVERY, GROWTH * still), MOST)
            ages = [[rank, reading.age, reading.still, asdict(state)] for rank, (reading, state) in now.items()]
            plain = plain_beats(beats)
            about = {} if plain == self._sent else {"beats": plain}
            self._sent = plain
            self.send({"say": "stall", "now": ages, **about})


def plain_beats(beats: Mapping[int, dict[str, Any]]) -> Message:
    """The beats of some ranks as a value of a message; smaller ones if the whole ones do not fit."""
    smaller: list[Callable[[dict[str, Any]], dict[str, Any]]] = [dict, only_pending, without_channels]
    for part_of in smaller:
        parts = {rank: part_of(beat) for rank, beat in beats.items()}
        ranks = [[rank, {name: beat[name] for name in _SENT if name in beat}] for rank, beat in parts.items()]
        plain = {"ranks": ranks, "groups": {name: it for beat in parts.values() for name, it in beat["groups"].items()}}
        if len(json.dumps(plain)) <= MOST_BEATS:
            break
    return plain


def readings_of(plain: Message, ages: Mapping[int, tuple[float, float]] | None = None) -> dict[int, Reading]:
    """The readings of beats in a message. `ages`: rank → age of its beat, and seconds without progress."""
    return {
        int(rank): Reading.parse({**beat, "groups": plain["groups"]}, age=age, still=still)
        for rank, beat in plain["ranks"]
        for age, still in [(ages or {}).get(int(rank), (0.0, 0.0))]
    }
