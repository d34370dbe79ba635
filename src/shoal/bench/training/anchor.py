"""Measure what a step computes on some ranks at once, so that predictions of scaling need not predict it.

Cores share caches, memory and power, and two of them may be threads of one core: ranks that compute at the same time
are slower than one alone, by a factor that depends on the model. So beside the rows, as many ranks make the step of the
model without exchanging gradients (`sync=local`). A row is predicted from it:

    step of a row = computation, by the planner x (measured / predicted, of the ranks that send nothing)
                  + messages, by the planner

On one rank, that is the base itself. In the bubble of a pipeline some ranks compute and others wait, so computation
there lies between both. Every factor is of one round: the machine has the same speed in all its parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.bench.training.cases import Ranks, checked_case, microbatch_of, with_plan, with_settings
from shoal.bench.training.predicted import Predicted
from shoal.bench.training.turns import Case
from shoal.config.recipe import CommSection, Recipe

NEVER = "sync=local:1000000"
"""Replicas that do not exchange gradients, and would average weights after this many steps."""


@dataclass(frozen=True)
class Anchors:
    """Number of ranks → the case in which they send nothing. Empty: predictions stand alone."""

    cases: Mapping[int, Case] = field(default_factory=dict)
    base: Case | None = None
    """One rank of the same program."""

    def anchored(self, case: Case, predictions: Mapping[str, Sequence[Predicted | None]]) -> Sequence[Predicted | None]:
        """Predictions of a case, one for each round, with the computation as it was measured. One rank is its own
        anchor, so its prediction is what was measured. There is none where the ranks that send nothing could not be
        measured: beside a base that was, a prediction without it would say nothing."""
        rounds = predictions.get(case.name, ())
        if case.job is None or self.base is None:
            return rounds
        ranks = case.job.recipe.plan.layout.world_size
        anchor = case if ranks == 1 else self.cases.get(ranks)
        if anchor is None or not self.base.is_measured:
            return rounds
        if not anchor.is_measured:
            return ()
        together, single = (_factors(each, predictions) for each in (anchor, self.base))
        three = zip(rounds, together, single, strict=False)
        return [
            None if own is None or many is None or one is None else own.with_computation(many, one, ranks)
            for own, many, one in three
        ]

    def to_mapping(self) -> list[dict[str, Any]]:
        """The time of a step of each, or why there is none, as JSON."""
        return [
            {"ranks": ranks, "step_seconds": case.seconds.to_mapping()}
            if case.is_measured
            else {"ranks": ranks, "reason": case.reason}
            for ranks, case in self.cases.items()
        ]


def _factors(case: Case, predictions: Mapping[str, Sequence[Predicted | None]]) -> list[float | None]:
    """How many times as long as predicted the computation of a case takes, in each round."""
    pairs = zip(predictions.get(case.name, ()), case.turns, strict=False)
    return [None if each is None else turn.median / each.computation for each, turn in pairs]


def alone(recipe: Recipe, ranks: Ranks, number: int, batch: int) -> Case:
    """The case of this many ranks that send nothing; with a reason if the recipe cannot be trained on them. Settings of
    messages are left out: some are rejected where there are none."""
    mb = microbatch_of(recipe, max(ranks.nproc))
    recipe = with_settings(recipe, run={"sync_batch_norm": False}).model_copy(update={"comm": CommSection()})
    words = f"dp_replicate={number} {NEVER}"
    changed = with_plan(recipe, words, ranks=number, batch=batch, mb=mb, threads=ranks.threads)
    return checked_case(f"{number} ranks that send nothing, batch {batch}", changed, number)
