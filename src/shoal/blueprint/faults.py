"""Fault injection: faults on a chosen rank at a chosen time, for tests and for trying out recovery.

    SHOAL_FAULTS="kill_at=rank:1,step:5 disk_full_at=rank:0,write:3,errno:EIO" shoal train ...

    kill_at              the process is killed, as by `kill -9`
    corrupt_at           one bit of the written data is flipped; of the next write, if this operation is no write
    disk_full_at         a disk operation fails half way; `errno:EIO` for another reason than no space
    slow_disk_at         a disk operation takes longer, by `seconds:2`
    fail_allreduce_at    the exchange of a step fails on this rank
    stop_at              the process is stopped, as by `kill -STOP`
    sleep_at             it sleeps before a collective; `seconds:2`, else for an hour
    hold_gil_at          the same, and it holds the GIL
    block_read_at        it reads from a pipe into which nothing is written
    other_op_at          it calls broadcast where the others call all_reduce
    other_shape_at       it calls all_reduce with another shape than the others
    flip_gradient_at     one bit of one gradient is flipped, once, before gradients are averaged
    flip_gradient_from   the same, in every computation from that step on

A fault happens wherever all of its conditions hold:

    rank:1          on this rank
    step:5          in this step, or in the save of this step
    save:2          in the second save
    write:3         at the third disk operation of the run, or of the named save
    generation:1    after the first restart; without it, only before any restart; `any`, always

A `kill_at` without a write or a save applies to the step itself, not to its save.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import ShoalError, listed, nearest

VARIABLE = "SHOAL_FAULTS"
GENERATION = "SHOAL_GENERATION"
"""The number of restarts of this run."""
DRILL = "SHOAL_CHAOS"
"""The folder of a drill, in which ranks take orders of `shoal chaos`."""

MISMATCHES = ("other_op_at", "other_shape_at")
"""Faults in a collective that all ranks make for them."""
HANGS = ("stop_at", "sleep_at", "hold_gil_at", "block_read_at", *MISMATCHES)
FLIPS = ("flip_gradient_at", "flip_gradient_from")
KINDS = ("kill_at", "corrupt_at", "disk_full_at", "slow_disk_at", "fail_allreduce_at", *HANGS, *FLIPS)
CONDITIONS = ("rank", "step", "write", "save", "generation")
SETTINGS = ("seconds", "errno")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault; a condition of None always holds."""

    kind: str
    rank: int | None = None
    step: int | None = None
    write: int | None = None
    save: int | None = None
    generation: int | None = 0
    seconds: float | None = None
    """How long it lasts; None: a second for a disk, an hour for a hang."""
    errno: int = errno.ENOSPC

    @property
    def is_of_disk(self) -> bool:
        """Whether it happens in a disk operation."""
        return self.kind in ("corrupt_at", "disk_full_at", "slow_disk_at") or bool(self.write or self.save)

    @property
    def is_of_save(self) -> bool:
        """Whether `write` counts the operations of one save, not those of the run."""
        return self.save is not None or self.step is not None

    def error(self, filename: object) -> OSError:
        """The error that a file operation raises under this fault."""
        return OSError(self.errno, os.strerror(self.errno), str(filename))


@dataclass(frozen=True, slots=True)
class Faults:
    """All configured faults.

    >>> faults = Faults.parse("kill_at=rank:1,step:5 slow_disk_at=write:2,seconds:0.5").on(rank=1)
    >>> faults.due("kill_at", step=5) is None, faults.due("kill_at", step=6) is None
    (False, True)
    """

    ordered: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Read words `KIND=CONDITION:NUMBER,...`, separated by spaces."""
        return cls(tuple(_fault(word) for word in text.split()))

    @classmethod
    def here(cls, rank: int, environ: Mapping[str, str] = os.environ) -> Faults:
        """The faults of this process, from its environment."""
        ordered = cls.parse(environ.get(VARIABLE, ""))
        return ordered.on(rank, int(environ.get(GENERATION, "0"))) if ordered.ordered else ordered

    def on(self, rank: int, generation: int = 0) -> Faults:
        """The faults of one rank, after this many restarts."""
        return Faults(
            tuple(
                fault for fault in self.ordered if fault.rank in (None, rank) and fault.generation in (None, generation)
            )
        )

    def due(
        self,
        kind: str,
        *,
        step: int | None = None,
        write: int | None = None,
        save: int | None = None,
        write_of_save: int | None = None,
    ) -> Fault | None:
        """The fault of a kind that happens now, in a step or, with `write`, in a disk operation."""
        for fault in self.ordered:
            if fault.kind == kind and fault.is_of_disk == (write is not None):
                number = write_of_save if fault.is_of_save else write
                conditions = ((fault.step, step), (fault.write, number), (fault.save, save))
                if all(expected is None or expected == now for expected, now in conditions):
                    return fault
        return None


def _fault(word: str) -> Fault:
    kind, equals, rest = word.partition("=")
    if kind in KINDS and not equals:
        raise ShoalError(f"{VARIABLE} has {word!r}: {kind} needs a condition", fix=f"{kind}=step:5", code="R051")
    if kind not in KINDS:
        raise ShoalError(f"{VARIABLE} has {word!r}: unknown fault {kind!r}", fix=_meant(kind, KINDS), code="R051")
    values: dict[str, int | float | None] = {}
    for pair in rest.split(",") if rest else ():
        name, _, text = pair.partition(":")
        if name not in CONDITIONS + SETTINGS:
            raise ShoalError(
                f"{VARIABLE} has {word!r}: unknown condition {name!r}",
                fix=_meant(name, CONDITIONS + SETTINGS),
                code="R051",
            )
        if name in values:
            raise ShoalError(
                f"{VARIABLE} has {word!r}: {name} is set twice", fix=f"one {name} for each fault", code="R051"
            )
        if kind in ("fail_allreduce_at", *HANGS, *FLIPS) and name in ("write", "save"):
            raise ShoalError(
                f"{VARIABLE} has {word!r}: a fault of a step has no {name}", fix=f"{kind}=rank:1,step:5", code="R051"
            )
        values[name] = _value(word, name, text)
    return Fault(kind=kind, **values)  # type: ignore[arg-type]  # `_value` returns the type of each name


def _value(word: str, name: str, text: str) -> int | float | None:
    lowest = 1 if name in ("write", "save") else 0
    try:
        if name == "errno":
            return int(getattr(errno, text))
        if name == "generation" and text == "any":
            return None
        value = float(text) if name == "seconds" else int(text)
        if lowest <= value < float("inf"):
            return value
    except (ValueError, AttributeError):
        pass
    rules = {"errno": "a name such as ENOSPC, EIO or EACCES", "seconds": "a number of seconds"}
    rule = rules.get(name, f"a whole number of at least {lowest}")
    example = {"errno": "EIO", "seconds": "2"}.get(name, str(lowest))
    raise ShoalError(
        f"{VARIABLE} has {word!r}: {name} must be {rule}, got {text!r}", fix=f"{name}:{example}", code="R051"
    )


def _meant(word: str, known: tuple[str, ...]) -> str:
    near = nearest(word, known)
    return near if near else listed(known)
