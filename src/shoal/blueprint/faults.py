"""Faults on demand: what is to go wrong, on which rank and when, so that a test or a person can see what happens then.

    SHOAL_FAULTS="kill_at=rank:1,step:5 disk_full_at=rank:0,write:3,errno:EIO" shoal train ...

    kill_at              the process is killed, as `kill -9` does
    corrupt_at           one bit of what is written differs from what was meant; of the next write, if this is none
    disk_full_at         an operation of the disk fails after a part of it; `errno:EIO` for another reason than no space
    slow_disk_at         an operation of the disk takes longer, by `seconds:2`
    fail_allreduce_at    the exchange of a step fails on this rank

A fault happens wherever all that it names holds, and nothing that it leaves out matters:

    rank:1          on this rank
    step:5          in this step, or in the save of this step
    save:2          in the second save
    write:3         at the third operation of the disk: of the run, or of the save that is named
    generation:1    after the first restart; left out, only before any; `any`, always

A `kill_at` that names neither a write nor a save is for the step itself, and not for its save.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import ShoalError, listed, nearest

VARIABLE = "SHOAL_FAULTS"
GENERATION = "SHOAL_GENERATION"
"""How often the processes of this run were started again."""

KINDS = ("kill_at", "corrupt_at", "disk_full_at", "slow_disk_at", "fail_allreduce_at")
CONDITIONS = ("rank", "step", "write", "save", "generation")
SETTINGS = ("seconds", "errno")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong; a condition that is None is not asked for."""

    kind: str
    rank: int | None = None
    step: int | None = None
    write: int | None = None
    save: int | None = None
    generation: int | None = 0
    seconds: float = 1.0
    errno: int = errno.ENOSPC

    @property
    def is_of_disk(self) -> bool:
        """Whether it happens in an operation of the disk."""
        return self.kind in ("corrupt_at", "disk_full_at", "slow_disk_at") or bool(self.write or self.save)

    @property
    def is_of_save(self) -> bool:
        """Whether it counts the operations of one save, and not those of the run."""
        return self.save is not None or self.step is not None

    def error(self, filename: object) -> OSError:
        """What an operation on a file says when this happens to it."""
        return OSError(self.errno, os.strerror(self.errno), str(filename))


@dataclass(frozen=True, slots=True)
class Faults:
    """Those that were ordered.

    >>> faults = Faults.parse("kill_at=rank:1,step:5 slow_disk_at=write:2,seconds:0.5").on(rank=1)
    >>> faults.due("kill_at", step=5) is None, faults.due("kill_at", step=6) is None
    (False, True)
    """

    ordered: tuple[Fault, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Faults:
        """From words: `KIND=CONDITION:NUMBER,...`, separated by spaces."""
        return cls(tuple(_fault(word) for word in text.split()))

    @classmethod
    def here(cls, rank: int, environ: Mapping[str, str] = os.environ) -> Faults:
        """Those of this process, from its environment."""
        ordered = cls.parse(environ.get(VARIABLE, ""))
        return ordered.on(rank, int(environ.get(GENERATION, "0"))) if ordered.ordered else ordered

    def on(self, rank: int, generation: int = 0) -> Faults:
        """Those of one rank, after so many restarts."""
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
        """The fault of a kind that happens now, in a step; or, with `write`, in an operation of the disk."""
        for fault in self.ordered:
            if fault.kind == kind and fault.is_of_disk == (write is not None):
                number = write_of_save if fault.is_of_save else write
                asked = ((fault.step, step), (fault.write, number), (fault.save, save))
                if all(wanted is None or wanted == given for wanted, given in asked):
                    return fault
        return None


def _fault(word: str) -> Fault:
    kind, equals, rest = word.partition("=")
    if kind in KINDS and not equals:
        raise ShoalError(f"{VARIABLE} has {word!r}, and does not say when", fix=f"{kind}=step:5")
    if kind not in KINDS:
        raise ShoalError(f"{VARIABLE} has {word!r}: there is no fault {kind!r}", fix=_meant(kind, KINDS))
    said: dict[str, int | float | None] = {}
    for pair in rest.split(",") if rest else ():
        name, _, text = pair.partition(":")
        if name not in CONDITIONS + SETTINGS:
            raise ShoalError(f"{VARIABLE} has {word!r}: there is no {name!r}", fix=_meant(name, CONDITIONS + SETTINGS))
        if name in said:
            raise ShoalError(f"{VARIABLE} has {word!r}: it says {name} twice", fix=f"one {name} for each fault")
        if kind == "fail_allreduce_at" and name in ("write", "save"):
            raise ShoalError(f"{VARIABLE} has {word!r}: an exchange has no {name}", fix=f"{kind}=rank:1,step:5")
        said[name] = _value(word, name, text)
    return Fault(kind=kind, **said)  # type: ignore[arg-type]  # each name has the value that `_value` gives it


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
    wanted = {"errno": "a name such as ENOSPC, EIO or EACCES", "seconds": "a number of seconds"}
    fix = f"{name}:{wanted.get(name, f'a whole number from {lowest} on')}"
    raise ShoalError(f"{VARIABLE} has {word!r}: {name} cannot be {text!r}", fix=fix)


def _meant(word: str, known: tuple[str, ...]) -> str:
    near = nearest(word, known)
    return near if near else listed(known)
