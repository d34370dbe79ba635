"""How often replicas synchronize: at every step, or every H steps (local SGD, DiLoCo). The values of `sync=` in a plan.

    auto        chosen when a run begins (`shoal.train.recipe.sync_autotune`)
    (none)      gradients are averaged at every step: all replicas are one model
    local:8     each replica makes 8 local steps, then their weights are averaged
    diloco:50   each replica makes 50 local steps; the mean change of weights is one step of an outer optimizer
                (SGD with Nesterov momentum) of the shared weights

A replica is all ranks with the same position on dp_replicate. `local:H` equals `diloco:H` with an outer optimizer of
learning rate 1 and no momentum, which takes the mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from shoal.errors import Problem, ShoalError, listed, nearest

Way = Literal["local", "diloco"]
WAYS: tuple[Way, ...] = get_args(Way)
AUTO = "auto"
"""Choose `sync` and `compress` when a run begins, from the measured step time and link."""
EXAMPLES: dict[Way, str] = {"local": "local:8", "diloco": "diloco:50"}


@dataclass(frozen=True, slots=True)
class SyncSpec:
    """The method, and the number of local steps between two synchronizations.

    >>> SyncSpec.parse("diloco:50")
    SyncSpec(way='diloco', every=50)
    """

    way: Way
    every: int

    @classmethod
    def parse(cls, word: str) -> SyncSpec:
        """Read the value of `sync=`; raises a ShoalError with the fix."""
        problem = check_word(word)
        if problem is not None:
            raise ShoalError(problem)
        name, _, every = word.partition(":")
        return cls(next(way for way in WAYS if way == name), int(every))

    def __str__(self) -> str:
        return f"{self.way}:{self.every}"


def check_word(word: object) -> Problem | None:
    """Check a value of `sync=`; None: it is valid."""
    name, colon, every = str(word).partition(":")
    if word == AUTO:
        return None
    is_number = every.isdecimal() and int(every) >= 1
    near = nearest(name.lower(), WAYS)
    example = next((f"sync={EXAMPLES[way]}" for way in WAYS if way == near), "")
    if not isinstance(word, str) or name not in WAYS:
        fix = f"sync={near}:{every}" if near and is_number else example or "sync=local:8, diloco:50 or auto"
        return Problem("P025", f"sync must be local:STEPS, diloco:STEPS or auto, got {word!r}", fix)
    if not colon:
        return Problem("P025", f"sync={word} needs a number of local steps", example)
    if not is_number:
        return Problem(
            "P025", f"the local steps of sync={name} must be a whole number of at least 1, got {every!r}", example
        )
    return None


def due(step: int, every: int, fragments: int) -> list[int]:
    """The fragments of the weights that are exchanged after a step, counted from 1.

    Each is exchanged every `every` steps, one after the other. The last one is due where an exchange of all would be.

    >>> [(step, due(step, 4, 2)) for step in range(1, 9) if due(step, 4, 2)]
    [(2, [0]), (4, [1]), (6, [0]), (8, [1])]
    """
    return [one for one in range(fragments) if (step - (one + 1) * every // fragments) % every == 0]


def check_fragments(fragments: int, delay: int, every: int) -> Iterator[Problem]:
    """Check that all fragments can be exchanged between two exchanges of the first."""
    if not 1 <= fragments <= every:
        yield Problem(
            "P026",
            f"comm.fragments must be from 1 to {every}, the local steps of sync=, got {fragments}",
            f"--comm.fragments {listed(n for n in (1, 2, 4, 8) if n <= every)}",
        )
    if not 0 <= delay < every:
        yield Problem(
            "P027",
            f"comm.outer_delay must be below {every}, the local steps of sync=, got {delay}",
            f"--comm.outer_delay {listed(dict.fromkeys((0, every - 1)))}",
        )
