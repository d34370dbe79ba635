"""How long the workers of a host may run without a sign that their coordinator still leads the run.

    agent     beat, at a ──▶ leader                       etcd
                             leader ── changes record ──▶   another one takes over TAKEOVER later at the earliest
              ◀── leads, a ── leader ◀─────────── done ──
    workers   end at a + LEASE, which is sooner

`a` is a moment of the agent's own clock, before the leader has changed its record. So clocks are never compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

LEASE = 2.75
"""Seconds: more than etcd takes to elect its own leader (1 to 2 s by default), and less than `TAKEOVER`."""
TAKEOVER = 3.25
"""Seconds in which the record of the leader must not have changed before another coordinator takes over. Within the
rest, agents end their workers."""
AGENT_BEAT = 0.25
"""Seconds between two heartbeats of an agent with a lease."""


def boottime() -> float:
    """Seconds since the machine was started, with those in which it slept: a lease ends meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Lease:
    """Of the workers of one agent, from one leader."""

    began: float | None = None
    """The last moment at which the leader is known to have led; None: none yet, and no worker may start."""
    joined_at: float = field(default_factory=boottime)

    def confirm(self, at: float) -> None:
        """Note that the leader has led at a moment of this agent's clock, or later."""
        self.began = max(at, self.began or at)

    @property
    def is_valid(self) -> bool:
        """Whether no other coordinator can have taken over yet."""
        return self.began is not None and boottime() < self.began + LEASE

    @property
    def is_over(self) -> bool:
        """Whether the leader has been silent for so long that an agent looks for another one."""
        return not self.is_valid and boottime() > self.joined_at + LEASE
