"""How long ranks may wait for another one before it is named, and before it is ended.

Naming is a line on stderr and costs nothing. Ending costs a restart, so it needs more certainty. All limits follow from
the measured steps and from `launch.timeout`.

| the rank                                        | named after                | ended after                  |
|-------------------------------------------------|----------------------------|------------------------------|
| stopped by a signal                             | 2 s                        | the same                     |
| another operation, shape or dtype in a step     | 2 s                        | the same                     |
| sleeps in a step and holds up the others        | max(3 s, 5 median steps)   | max(5 s, 10 median steps)    |
| the same, and uses a GPU                        | max(3 s, 5 median steps)   | 10 times that                |
| computes in a step and holds up the others      | max(3 s, 5 median steps)   | 10 times that                |
| blocked in the kernel (a disk, NFS) in a step   | max(3 s, 5 median steps)   | 10 times that                |
| between two steps, where data is fetched        | max(3 s, 5 median steps)   | nine tenths of the timeout   |
| sleeps in its first steps, without a GPU        | a twentieth of the timeout | a tenth of the timeout       |
| the same, and holds the GIL                     | a 120th of the timeout     | a sixtieth of the timeout    |
| in another phase: start, first steps, save, ... | a twentieth of the timeout | nine tenths of the timeout   |
| all are in one call between hosts (a slow link) | a twentieth of the timeout | nine tenths of the timeout   |

A rank computes also if a process that it has started does: a compiler. A host thread that sleeps in a call of a GPU's
driver is normal, so it has longer. Code that waits for long releases the GIL; what does not, in first steps, may load a
library from a slow disk. Other operations, shapes or dtypes in another phase have the limits of that phase.
Nothing is ended later than nine tenths of the timeout: then the collectives of the others would time out, and blame
whichever neighbour they waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP = "step"
"""The phase in which the measured steps are the scale. All other phases have the timeout as their scale: in them one
rank may work alone for minutes (rank 0 saves, a model compiles, a file is downloaded)."""
DATA = "data"
FIRST_STEPS = "first steps"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits in seconds, from `launch.timeout`."""

    timeout: float = 600.0

    @property
    def stopped(self) -> float:
        """For a rank in state T, and for a mismatch: both are certain."""
        return min(2.0, 0.5 * self.timeout)

    @property
    def slow_link(self) -> float:
        """For a call between hosts that all ranks have entered: it may only be slow. It is ended after `last`."""
        return max(min(3.0, self.last), self.timeout / 20)

    @property
    def last(self) -> float:
        """The longest that ranks wait, before their collectives time out by themselves."""
        return 0.9 * self.timeout

    def named(self, phase: str, median_step: float, *, holds_gil: bool = False) -> float:
        """After this, a rank that holds up the others is named. `holds_gil`: it sleeps and holds the GIL."""
        if phase in (STEP, DATA):
            return min(max(3.0, 5 * median_step), self.last)
        return max(min(3.0, self.last), self.timeout / (120 if holds_gil and phase == FIRST_STEPS else 20))

    def ended(self, phase: str, median_step: float, *, may_pass: bool, holds_gil: bool = False) -> float:
        """After this it is ended. `may_pass`: it computes, uses a GPU, or waits for a disk; `holds_gil`: as above."""
        if phase == FIRST_STEPS and not may_pass:  # nothing compiles: a rank hangs, as after a restart
            named = self.named(phase, median_step, holds_gil=holds_gil)
            return max(named, self.timeout / (60 if holds_gil else 10))
        if phase != STEP:
            return self.last
        return min(10 * self.named(phase, median_step) if may_pass else max(5.0, 10 * median_step), self.last)
