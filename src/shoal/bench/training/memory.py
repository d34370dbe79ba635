"""Peak memory of a recipe under several plans, by cause, measured and predicted.

parameters, gradients, optimizer   counted from live tensors, after a backward
process                            the process before its model was built; on a CPU alone
other                              the rest of the peak: activations, buffers, gathered parameters, libraries
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.bench.training.cases import Ranks, checked_case, with_plan
from shoal.bench.training.predicted import Predicted, predict_case
from shoal.bench.training.turns import Case, Turn, measure_in_turns
from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.predict.cluster import Cluster

CAUSES = ("parameters", "gradients", "optimizer", "other", "process")
STATES = CAUSES[:3]


@dataclass(frozen=True)
class MemoryRow:
    """A plan on a number of ranks."""

    plan: str
    ranks: int
    case: Case


def memory_rows(recipe: Recipe, ranks: Ranks, plans: tuple[str, ...]) -> list[MemoryRow]:
    """All rows, checked before anything is started. The recipe's own batch and microbatch hold for all."""
    rows = []
    for number in ranks.nproc:
        for plan in plans:
            changed = with_plan(
                recipe, plan, ranks=number, batch=recipe.data.global_batch, mb=recipe.plan.mb, threads=ranks.threads
            )
            rows.append(MemoryRow(plan, number, checked_case(f"{plan} on {number}", changed, number)))
    return rows


def measure_memory(rows: list[MemoryRow], steps: int, say: Callable[[str, int, int], None]) -> None:
    """Measure all rows, one turn each: a peak does not depend on the time. Raises if none could be measured."""
    measure_in_turns([row.case for row in rows], steps=steps, rounds=1, say=say)
    if not any(row.case.is_measured for row in rows):
        what = f"no plan could be measured: {rows[0].plan} on {rows[0].ranks}: {rows[0].case.reason}"
        raise ShoalError(what, fix="--plans ddp,zero=3", code="N113")


def to_mapping(rows: list[MemoryRow], cluster: Cluster) -> dict[str, Any]:
    """The rows as JSON, in bytes on the fullest rank."""
    found = [_row(row, cluster) for row in rows]
    errors = [abs(row["error"]) for row in found if row.get("error") is not None]
    return {"rows": found, "worst_error": max(errors, default=None)}


def _row(row: MemoryRow, cluster: Cluster) -> dict[str, Any]:
    case = row.case
    known: dict[str, Any] = {"plan": row.plan, "ranks": row.ranks, "reason": case.reason or None}
    if case.job is None or not case.is_measured:
        return known
    measured = by_cause(case.turns[-1], is_host=cluster.device.is_host)
    predicted = predict_case(case.job.recipe, cluster)
    known |= {"measured": measured, "predicted": None if predicted is None else _predicted(predicted)}
    if predicted is not None:
        known["error"] = predicted.peak / measured["total"] - 1
    return known


def by_cause(turn: Turn, *, is_host: bool) -> dict[str, float]:
    """The peak of a turn by cause; the causes add to the total."""
    states = {cause: float(getattr(turn.states, cause)) for cause in STATES}
    process = float(turn.process) if is_host else 0.0
    other = turn.peak - process - sum(states.values())
    return {**states, "other": other, "process": process, "total": float(turn.peak)}


def _predicted(found: Predicted) -> dict[str, float]:
    return {**{cause: found.memory.get(cause, 0.0) for cause in CAUSES}, "total": found.peak}
