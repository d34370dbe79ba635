"""Compare a disturbed run with an undisturbed one: losses, samples, final state."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.chaos.journal import Journal

Samples = Mapping[int, Counter[str]]
"""Step → digests of its samples over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How two runs of one recipe differ."""

    steps: int
    """Steps that both should have made."""
    missing_steps: list[int]
    """Steps without a loss in the disturbed run."""
    other_losses: list[int]
    """Steps whose loss differs in any bit."""
    samples_lost: int
    samples_doubled: int
    tensors_different: int
    """Tensors of the last checkpoint that differ; -1: one of the runs has none."""

    @property
    def is_equal(self) -> bool:
        """Whether the fault was without any consequence."""
        sizes = (len(self.missing_steps), len(self.other_losses), self.samples_lost, self.samples_doubled)
        return not any(sizes) and self.tensors_different == 0


def compare_runs(
    disturbed: tuple[Path, Path], plain: tuple[Path, Path], *, steps: int, tensors_different: int
) -> Agreement:
    """Compare two runs. Each is given by its run directory and the folder of its drill."""
    found, expected = (read_losses(each[0]) for each in (disturbed, plain))
    lost, doubled = compare_samples(*(read_samples(each[1]) for each in (disturbed, plain)))
    return Agreement(
        steps=steps,
        missing_steps=[step for step in range(1, steps + 1) if step not in found],
        other_losses=[step for step, loss in found.items() if expected.get(step) != loss],
        samples_lost=lost,
        samples_doubled=doubled,
        tensors_different=tensors_different,
    )


def read_losses(directory: Path) -> dict[int, str]:
    """Step → its loss, as a hexadecimal number."""
    path = directory / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {each["step"]: float(each["loss"]).hex() for each in records if "loss" in each}


def read_samples(folder: Path) -> dict[int, Counter[str]]:
    """The samples of each step. Of a step that was made twice, those of the last time count: it was committed."""
    last: dict[tuple[int, str], tuple[float, list[str]]] = {}
    for path in sorted((folder / "samples").glob("*.jsonl")):
        rank = path.name.partition("-")[0]
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # else the rank was killed in the middle of it
                found = json.loads(line)
                key = (int(found["step"]), rank)
                last[key] = max(last.get(key, (0.0, [])), (float(found["at"]), found["samples"]))
    samples: dict[int, Counter[str]] = {}
    for (step, _), (_, digests) in last.items():
        samples.setdefault(step, Counter()).update(digests)
    return samples


def compare_samples(found: Samples, expected: Samples) -> tuple[int, int]:
    """Samples that steps lack, and those that they have in excess.

    >>> compare_samples({1: Counter("ab"), 2: Counter("bc")}, {1: Counter("ab"), 2: Counter("cd")})
    (1, 1)
    """
    steps = found.keys() | expected.keys()
    nothing: Counter[str] = Counter()
    lost = sum((expected.get(step, nothing) - found.get(step, nothing)).total() for step in steps)
    return lost, sum((found.get(step, nothing) - expected.get(step, nothing)).total() for step in steps)


def committed_steps_lost(journal: Journal) -> tuple[int, int]:
    """Committed steps that a restart did not find again; and those of damaged checkpoints, which were made again.

    A restart begins one step after its checkpoint. `latest` had named a newer one before: the steps up to the newest
    checkpoint that was not damaged are lost.
    """
    lost = damaged = 0
    for at, first in restarts(journal):
        named = {each.step for each in journal.commits if each.at <= at}
        missing = max(0, max(named, default=0) - (first - 1))
        missing_good = max(0, max(named - _damaged(journal, at), default=0) - (first - 1))
        lost += missing_good
        damaged += missing - missing_good
    return lost, damaged


def _damaged(journal: Journal, at: float) -> set[int]:
    """The steps whose checkpoint the drill had damaged, and that were not made and committed again, at a moment."""
    found = set()
    for each in journal.made:
        made_again = (step.at for step in journal.steps if step.step == each.damaged and step.at > each.at)
        first = next(made_again, at)
        is_saved_again = any(one.step == each.damaged and first < one.at <= at for one in journal.commits)
        if each.damaged is not None and each.at <= at and not is_saved_again:
            found.add(each.damaged)
    return found


def restarts(journal: Journal) -> Iterable[tuple[float, int]]:
    """Time and number of the first step of each new generation of rank 0."""
    for old, new in itertools.pairwise(journal.steps):
        if old.worker != new.worker:
            yield new.at, new.step
