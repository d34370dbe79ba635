"""The recipe of a plan on some ranks, checked before anything is started; an illegal one keeps its reason."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from shoal.bench.training.turns import Case
from shoal.blueprint.plan import Plan
from shoal.blueprint.plan_parser import parse_words
from shoal.blueprint.replicas.sync_words import AUTO
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.config.recipe import DataSection, Recipe
from shoal.data.fingerprint import Fingerprint
from shoal.data.sources.open import open_datasets
from shoal.errors import Problem, ShoalError
from shoal.launch.local import fork_is_safe, launch
from shoal.train.recipe.memory.fits import check_fits
from shoal.train.recipe.preflight import Datasets, Job, as_trained, check_recipe

KEPT = ("recompute", "precision")
"""Words of the recipe's own plan that hold for every plan, unless that has another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The ranks of a measurement, and the cores that they have."""

    nproc: tuple[int, ...]
    threads: int
    """Of each rank, the same for every number of ranks."""
    cores: int
    device: str
    """cpu or cuda."""
    hosts: tuple[int, ...] = ()
    """Ranks of each host, this one first, which the largest number of ranks is spread over; empty: of this host alone.
    Other numbers of ranks are measured on this host."""

    @property
    def most_here(self) -> int:
        """The largest number of ranks that is measured on this host alone."""
        return max(number for number in self.nproc if not self.is_spread(number))

    def is_spread(self, ranks: int) -> bool:
        """Whether a number of ranks is spread over the hosts."""
        return bool(self.hosts) and ranks == sum(self.hosts)

    def here(self, ranks: int) -> int:
        """Those of a number of ranks that are on this host."""
        return self.hosts[0] if self.is_spread(ranks) else ranks

    def shared(self, ranks: int) -> str:
        """Why a number of ranks says nothing about scaling; empty: it does."""
        ranks = self.here(ranks)
        if self.device != "cpu" or ranks * self.threads <= self.cores:
            return ""
        of = "" if self.threads == 1 else f" of {self.threads} threads"
        return f"{ranks} ranks{of} share {self.cores} core{'s' * (self.cores != 1)}: not a measure of scaling"


def microbatch_of(recipe: Recipe, most_ranks: int) -> int:
    """Samples of a microbatch, the same on one rank and on all: the recipe's, or a rank's share of the batch."""
    return recipe.plan.mb or max(1, recipe.data.global_batch // most_ranks)


def with_settings(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    """The recipe with other values in some sections."""
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=values) for name, values in sections.items()}
    )


def with_plan(recipe: Recipe, words: str, *, ranks: int, batch: int, mb: int | None, threads: int) -> Recipe:
    """The recipe with a plan of these words. Problems of the words are raised."""
    kept = {key: value for key, value in recipe.plan.to_mapping().items() if key in KEPT}
    mapping = {**kept, **({} if mb is None else {"mb": mb}), **parse_words(words)}
    changed = with_settings(
        recipe, data={"global_batch": batch}, launch={"nproc": ranks, "threads": threads}, run={"planned": False}
    )
    return changed.model_copy(update={"plan": Plan(**mapping)})


def checked_case(name: str, recipe: Recipe, ranks: int, here: int | None = None) -> Case:
    """The case of a recipe; with a reason if the recipe cannot be trained so. `here`: the ranks of this host; None:
    all."""
    problems, job = checked_job(recipe, ranks, here)
    return Case(name, job, _in_one_line(problems))


def checked_job(recipe: Recipe, ranks: int, here: int | None = None) -> tuple[list[Problem], Job | None]:
    """The job of a recipe, or all its problems."""
    if recipe.plan.sync == AUTO:
        what = "sync=auto is chosen when a run begins, and a benchmark needs a value"
        return [Problem("R055", what, "sync=diloco:50, or no sync")], None
    try:
        found = (
            launch(_problems, (recipe, ranks, here or ranks), nproc=1)[0]
            if fork_is_safe()
            else _problems(None, None, recipe, ranks, here or ranks)
        )
        return found, None if found else _job(recipe, ranks)
    except ShoalError as error:
        return list(error.problems), None


def _problems(placement: Placement | None, store: Store | None, recipe: Recipe, ranks: int, here: int) -> list[Problem]:
    """The problems of a recipe, found in a process of its own: the trace of a pipeline starts threads, after which no
    rank could be forked, and loads libraries that would count as memory of every row."""
    return list(check_recipe(recipe, ranks, check_size=check_fits(here)).problems)


def _job(recipe: Recipe, ranks: int) -> Job:
    """The job of a recipe without problems."""
    recipe = as_trained(recipe)
    datasets = _opened(recipe.data.model_copy(update={"global_batch": 1}).model_dump_json(), recipe.run.seed)
    recipe = recipe.model_copy(update={"plan": recipe.plan.resolve(ranks)})
    return Job(recipe, *datasets, Fingerprint.of(*datasets))


@functools.lru_cache(maxsize=1)
def _opened(section: str, seed: int) -> Datasets:
    """The data of a recipe, once for all rows: ranks are forked with all that this process holds, so that the memory of
    a row would grow with the number of rows. Rows differ in their global batch alone, of which no sample depends."""
    return open_datasets(DataSection.model_validate_json(section), seed)


def _in_one_line(problems: Sequence[Problem]) -> str:
    if not problems:
        return ""
    first = problems[0]
    fix = f" (fix: {first.fix})" if first.fix else ""
    return f"{first.what.splitlines()[0]} [{first.code}]{fix}"
