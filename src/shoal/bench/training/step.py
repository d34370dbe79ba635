"""What each setting of a recipe buys on this machine: one row for each change, against the recipe as it is.

The recipe and all changes take turns. A ratio compares the turns of one round, so that a busy minute affects both
sides. A change is worth it if it is faster in every round, or if it saves memory and costs little time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import Store

from shoal.bench.training.cases import checked_case, checked_job, with_settings
from shoal.bench.training.predicted import Predicted, predict_case
from shoal.bench.training.turns import WARMUP_STEPS as WARMUP_STEPS
from shoal.bench.training.turns import Case, Spread, measure_in_turns, ratios
from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import Plan
from shoal.comm.rendezvous.launcher_environment import Placement
from shoal.config.recipe import Recipe
from shoal.errors import raise_if
from shoal.launch.local import launch
from shoal.numerics.precision import PRECISIONS, slow_here
from shoal.predict.cluster import Cluster

BUCKETS = (1.0, 100.0)
"""Sizes of gradient buckets in MB; the default is 25."""
FASTER = 0.97
"""A median ratio up to this is worth it, if every round was faster. Smaller differences vanish in the noise."""
SMALLER, SLOWER = 0.9, 1.1
"""Memory up to this part of the recipe's is worth it, if the time is at most this part."""
Path = tuple[str, str]
"""Section and key of a setting."""


@dataclass(frozen=True)
class Change:
    """Settings to change together, by section and key."""

    name: str
    settings: Mapping[Path, Any]
    note: str = ""
    """What else it changes."""

    @property
    def overrides(self) -> list[str]:
        """The words to paste after `shoal train`."""
        return [
            word
            for (section, key), value in self.settings.items()
            for word in (f"--{section}.{key}", f"{value:g}" if isinstance(value, float) else str(value))
        ]

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe with the change; raises if a plan cannot have it."""
        plan = {key: value for (section, key), value in self.settings.items() if section == "plan"}
        changed = recipe.model_copy(update={"plan": Plan.of({**recipe.plan.to_mapping(), **plan})}) if plan else recipe
        for (section, key), value in self.settings.items():
            if section != "plan":
                changed = with_settings(changed, **{section: {key: value}})
        return changed


@dataclass(frozen=True)
class StepRow:
    """A change and its measurement; the first row has no change."""

    change: Change
    case: Case


def changes_of(recipe: Recipe, ranks: int, words: Sequence[str]) -> Iterator[Change]:
    """The changes of the named kinds. A kind that has no effect here has no change."""
    plan = recipe.plan.fill(ranks)
    if "microbatch" in words:
        share = max(1, recipe.data.global_batch // plan.with_layout().layout.data_degree)
        now = plan.mb or share
        sizes = [size for size in divisors(share) if size != now]
        near = [*[size for size in sizes if size < now][-2:], *[size for size in sizes if size > now][:1]]
        yield from (Change(f"microbatch of {size}", {("plan", "mb"): size}) for size in near)
    if "buckets" in words and not plan.zero and (plan.dp_replicate or 1) > 1:
        yield from (Change(f"buckets of {size:g} MB", {("run", "bucket_mb"): size}) for size in BUCKETS)
    if "recompute" in words:
        others = [each for each in ("none", "selective", "full") if each != plan.recompute]
        yield from (Change(f"recompute {each}", {("plan", "recompute"): each}) for each in others)
    if "precision" in words:
        other = "bf16" if plan.precision != "bf16" else "fp32"
        yield Change(f"precision {other}", {("plan", "precision"): other}, "other rounding: losses differ")
    if "compile" in words and not recipe.run.compile:
        yield Change("compile", {("run", "compile"): True}, "the first step takes longer")


def step_rows(recipe: Recipe, ranks: int, changes: Sequence[Change]) -> list[StepRow]:
    """The recipe and its changes, checked before anything is started. Problems of the recipe are raised."""
    problems, job = checked_job(recipe, ranks)
    raise_if(problems)
    rows = [StepRow(Change("the recipe", {}), Case("the recipe", job))]
    for change in changes:
        case = checked_case(change.name, change.applied(recipe), ranks)
        precision = change.settings.get(("plan", "precision"))
        if precision is not None and not case.reason:
            (case.reason,) = launch(why_slow, (precision, recipe.launch.device), nproc=1)
        rows.append(StepRow(change, case))
    return rows


def why_slow(placement: Placement | None, store: Store | None, precision: str, device: str) -> str:
    """Why a precision is not measured: some CPUs need a hundred times as long for it. Empty: it is."""
    is_cpu = device == "cpu" or not torch.cuda.is_available()
    return slow_here(PRECISIONS[precision], torch.device("cpu" if is_cpu else "cuda")) or ""


def measure_steps(rows: Sequence[StepRow], *, steps: int, rounds: int, say: Callable[[str, int, int], None]) -> None:
    """Measure all rows in turns."""
    measure_in_turns([row.case for row in rows], steps=steps, rounds=rounds, say=say)


def together(rows: Sequence[StepRow]) -> Change | None:
    """All changes that make a step faster, as one; of a kind the fastest. None: fewer than two do."""
    base, best = rows[0].case, dict[Path, tuple[float, Change]]()
    for row in rows[1:]:
        if row.case.is_measured and is_faster(found := ratios(row.case, base)):
            (path,) = row.change.settings
            if path not in best or found.median < best[path][0]:
                best[path] = found.median, row.change
    if len(best) < 2:
        return None
    settings = {path: value for _, change in best.values() for path, value in change.settings.items()}
    return Change("all of these together", settings)


def is_faster(ratio: Spread) -> bool:
    """Whether a ratio of times shows a gain: in the median, and in every round."""
    return ratio.median <= FASTER and ratio.high < 1


def is_smaller(ratio: Spread, of_memory: float) -> bool:
    """Whether a change saves memory for little time."""
    return of_memory <= SMALLER and ratio.median <= SLOWER


# ---- the result -----------------------------------------------------------------------------------------------------


def to_mapping(rows: Sequence[StepRow], cluster: Cluster) -> dict[str, Any]:
    """The rows as JSON; times in seconds, memory in bytes. `paste`: the words of the best row, by time."""
    base = rows[0]
    assert base.case.job is not None
    base_predicted = predict_case(base.case.job.recipe, cluster)
    found = [_row(row, base, cluster, base_predicted) for row in rows]
    worth = [row for row in found if row.get("is_faster")]
    best = min(worth, key=lambda row: row["ratio"]["median"], default=None)
    return {"rows": found, "best": None if best is None else best["name"], "paste": best["overrides"] if best else []}


def with_together(found: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """The result with the row of all faster changes together, which was measured afterwards against the recipe."""
    row = again["rows"][1]
    best = next(each for each in found["rows"] if each["name"] == found["best"])
    is_best = row.get("is_faster") and row["ratio"]["median"] <= best["ratio"]["median"]
    chosen = {"best": row["name"], "paste": row["overrides"]} if is_best else {}
    return {**found, "rows": [*found["rows"], row], **chosen}


def _row(row: StepRow, base: StepRow, cluster: Cluster, base_predicted: Predicted | None) -> dict[str, Any]:
    case = row.case
    known: dict[str, Any] = {
        "name": row.change.name, "overrides": row.change.overrides, "note": row.change.note or None,
        "reason": case.reason or None,
    }  # fmt: skip
    if case.job is None or not case.is_measured:
        return known
    ratio, of_memory = ratios(case, base.case), case.peak / base.case.peak
    own = base_predicted if row is base else predict_case(case.job.recipe, cluster)
    known |= {
        "step_seconds": case.seconds.to_mapping(),
        "ratio": ratio.to_mapping(),
        "peak_bytes": case.peak,
        "peak_ratio": of_memory,
        "loss": case.turns[-1].losses[-1],
        "is_faster": row is not base and is_faster(ratio),
        "is_smaller": row is not base and is_smaller(ratio, of_memory),
    }
    if own is not None and base_predicted is not None and ("run", "bucket_mb") not in row.change.settings:
        known |= {"predicted_ratio": own.seconds / base_predicted.seconds, "predicted_peak": own.peak}
        known["predicted_seconds"] = own.seconds
    return known
