"""How often replicas hear of each other: at every step, or every H steps. The words of a plan after `sync=`.

    auto        chosen when a run begins (`shoal.train.recipe.sync_autotune`)
    (none)      gradients are averaged at every step: all replicas are one model
    local:8     islands: each makes 8 steps of its own, then their weights are averaged
    diloco:50   islands: each makes 50 steps of its own; how far they have come, on average, is one step of an outer
                optimizer (SGD with Nesterov momentum) of the weights that they share

An island is all ranks with the same place on dp_replicate. `local:H` is `diloco:H` whose outer optimizer just takes the
mean: learning rate 1, no momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shoal.errors import Problem, ShoalError, listed, nearest

Way = Literal["local", "diloco"]
WAYS: tuple[Way, ...] = get_args(Way)
AUTO = "auto"
"""To be chosen when a run begins, `compress` with it, by what a step takes and what the link can do."""
EXAMPLES: dict[Way, str] = {"local": "local:8", "diloco": "diloco:50"}


@dataclass(frozen=True, slots=True)
class SyncSpec:
    """That replicas meet every so many steps.

    >>> SyncSpec.parse("diloco:50")
    SyncSpec(way='diloco', every=50)
    """

    way: Way
    every: int

    @classmethod
    def parse(cls, word: str) -> SyncSpec:
        """Read the word of a plan; raises a ShoalError that says what would be right."""
        problem = problem_of(word)
        if problem is not None:
            raise ShoalError(problem)
        name, _, every = word.partition(":")
        return cls(next(way for way in WAYS if way == name), int(every))

    def __str__(self) -> str:
        return f"{self.way}:{self.every}"


def problem_of(word: object) -> Problem | None:
    """What is wrong with a word after `sync=`, if anything is."""
    name, colon, every = str(word).partition(":")
    if word == AUTO:
        return None
    is_number = every.isdecimal() and int(every) >= 1
    near = nearest(name.lower(), WAYS)
    example = next((f"sync={EXAMPLES[way]}" for way in WAYS if way == near), "")
    if not isinstance(word, str) or name not in WAYS:
        known = "sync=local:8, diloco:50 or auto; without it, replicas meet at every step"
        return Problem(
            f"sync={word!r} does not exist", f"sync={near}:{every}" if near and is_number else example or known
        )
    if not colon:
        return Problem(f"sync={word}: how many steps islands make on their own is missing", example)
    if not is_number:
        return Problem(f"sync={word}: {every!r} is not a whole number of at least 1", example)
    return None


def due(step: int, every: int, fragments: int) -> list[int]:
    """Which fragments of the weights are exchanged after a step, counted from 1: each every `every` steps, one after
    the other; the last one where an exchange of all would be.

    >>> [(step, due(step, 4, 2)) for step in range(1, 9) if due(step, 4, 2)]
    [(2, [0]), (4, [1]), (6, [0]), (8, [1])]
    """
    return [one for one in range(fragments) if (step - (one + 1) * every // fragments) % every == 0]


def reject_fragments(fragments: int, delay: int, every: int) -> Problem | None:
    """Fragments that could not all be exchanged between two exchanges of the first."""
    if not 1 <= fragments <= every:
        return Problem(
            f"{fragments} fragments cannot take turns within {every} steps",
            f"--comm.fragments {listed(n for n in (1, 2, 4, 8) if n <= every)}",
        )
    if not 0 <= delay < every:
        return Problem(
            f"what is sent arrives {delay} steps later, and the next is sent after {every}",
            f"--comm.outer_delay 0, or less than {every}",
        )
    return None
