"""Whether a run may resume under another recipe: settings that decide its numbers may not change."""

from __future__ import annotations

from typing import Any

from shoal.blueprint.plan import Plan
from shoal.config.load import difference
from shoal.config.recipe import Recipe
from shoal.errors import ShoalError

FREE = (
    *("launch.", "checkpoint.", "comm.", "data.workers", "data.prefetch", "data.changed", "data.cache", "plan"),
    *("run.dir", "run.start_from", "run.overwrite", "run.name", "run.duration", "run.log_every", "run.evaluate_every"),
    *("run.per_rank_metrics", "run.trackers", "run.on_nan", "run.deterministic", "run.fast_dev_run", "run.bucket_mb"),
    *("run.planned", "run.find_unused_parameters", "run.compile", "run.attention", "run.loss", "run.recompute_swiglu"),
    *("run.check_replicas", "run.check_compute", "run.fused_layers", "run.profile"),
)
"""Prefixes of keys that may change: they decide where and how a run computes, not its numbers.

Of a plan, only the precision may not change. `compress`, `sync` and `comm.` may.
"""


def changes(old: dict[str, Any], new: Recipe) -> list[str]:
    """One line for each changed key that may not change: `optim.lr: 0.001 → 0.002`.

    >>> changes({"optim": {"lr": 0.1}, "run": {"duration": "5step"}}, Recipe())
    ['optim.lr: 0.1 → 0.0003']
    >>> new = Recipe.model_validate({"plan": "fp8", "run": {"fp8": "rowwise", "recompute_swiglu": False}})
    >>> changes({"plan": "fp8"}, new), changes({"run": {"fp8": "rowwise"}}, Recipe())
    (['run.fp8: tensorwise → rowwise'], [])
    """
    before, after = _filled(old), new.model_dump(mode="json")
    was, is_now = Plan.of(before["plan"]).precision, new.plan.precision
    free = FREE if "fp8" in (was, is_now) else (*FREE, "run.fp8")  # no effect on other precisions
    found = [line for line in difference(before, after) if not line.startswith(free)]
    return [*found, f"plan.precision: {was} → {is_now}"] if was != is_now else found


def reject_changes(old: dict[str, Any], new: Recipe, *, where: str) -> None:
    """Raise if a run of `old` cannot resume as `new`."""
    if found := changes(old, new):
        more = f"; and {len(found) - 5} more" if len(found) > 5 else ""
        raise ShoalError(
            f"{where} holds a run of another recipe: {'; '.join(found[:5])}{more}; nothing was touched",
            fix="the earlier values, or --run.dir SOMEWHERE_ELSE, or --resume fresh to remove the earlier run",
            code="C021",
        )


def _filled(old: dict[str, Any]) -> dict[str, Any]:
    """A stored recipe with the defaults of keys that it lacks."""
    try:
        return Recipe.model_validate(old).model_dump(mode="json")
    except ValueError:  # it has keys of an older version
        return {**Recipe().model_dump(mode="json"), **old}
