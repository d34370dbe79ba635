"""What was predicted of a recipe's step, beside its profile, and what to type next."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from shoal.config.recipe import Recipe
from shoal.observe.profile.verdict import Verdict
from shoal.parallel.inspect.live_memory import live_memory
from shoal.planner.changes.next_change import COMPUTE, NextChange, next_change
from shoal.planner.task import Task
from shoal.predict.estimate.step_time import StepTime
from shoal.train.profile.fixes import MODEL_AXES, cause_of, for_cores, to_type
from shoal.train.recipe.auto_plan import is_calibrated, model_of
from shoal.train.recipe.predict_step import task_for
from shoal.train.run import Run

PRICED = ("compute", "bubble", "recompute", "dp", *MODEL_AXES)
"""Causes of which the planner predicts what less of them saves."""


@dataclass(frozen=True)
class Advice:
    """The prediction for a recipe whose plan is resolved. Only the main rank makes one, so none of it may raise: the
    other ranks would wait for it."""

    recipe: Recipe
    per_host: int
    """Ranks of each host."""
    workers: int = 0
    """Processes that prepare batches of a rank."""

    @cached_property
    def task(self) -> Task | None:
        """The planner's task; None: the model cannot be predicted."""
        try:
            return task_for(self.recipe, model_of(self.recipe), per_node=self.per_host)
        except Exception:  # no preset for this machine, or a model that the planner cannot read
            return None

    @cached_property
    def predicted(self) -> dict[str, float]:
        """Part → seconds of a step; empty: not predicted."""
        with suppress(Exception):
            return {} if self.task is None else parts_of(self.task.time(self.recipe.plan), self.recipe)
        return {}

    def fix(self, verdict: Verdict) -> str:
        """What to type: a change that the planner has priced, if it can."""
        if verdict.kind == "cores":
            return for_cores(self.recipe, self.per_host)
        with suppress(Exception):
            if (found := self._priced(verdict)) is not None:
                return str(found)
        return to_type(verdict, self.recipe, workers=self.workers)

    @property
    def is_calibrated(self) -> bool | None:
        """Whether the prediction is of rates that were measured on these machines; None: there is none."""
        return is_calibrated(self.task.cluster) if self.task is not None and self.predicted else None

    def memory(self, run: Run) -> dict[str, Any]:
        """Bytes: counted states of this rank, and the prediction by cause, of the fullest rank."""
        found: dict[str, Any] = {}
        with suppress(Exception):
            counted = live_memory(run.composed, run.optimizer)
            found["counted"] = {"parameters": counted.parameters, "optimizer": counted.optimizer}
        with suppress(Exception):
            if self.task is not None:
                predicted = self.task.memory(self.recipe.plan)
                causes = {name: round(size) for name, size in asdict(predicted).items() if name != "stage" and size > 1}
                found["predicted"] = {**causes, "total": round(predicted.total)}
        return found

    def _priced(self, verdict: Verdict) -> NextChange | None:
        cause, plan = cause_of(verdict), self.recipe.plan
        has_bucket = verdict.kind == "bucket" and self.recipe.run.bucket_mb is not None
        if self.task is None or has_bucket or cause not in PRICED:
            return None
        if self.task.cluster.num_devices != plan.layout.world_size:  # hosts with different numbers of ranks
            return None
        return next_change(self.task, plan, cause)


def parts_of(time: StepTime, recipe: Recipe) -> dict[str, float]:
    """A predicted step in the parts of a profile. A forward takes half as long as a backward."""
    causes = time.causes()
    plan = recipe.plan
    compute, again = sum(causes[name] for name in COMPUTE), plan.recompute == "full"
    passes = 4 if again else 3
    found = {
        "forward": compute / passes,
        "backward": compute * 2 / passes,
        "recompute": compute / passes if again else 0.0,
        **_waits(causes, plan.shard_axis if plan.is_sharded else plan.gradient_axis),
        "bubble": causes["bubble"],
        "optimizer": causes["optimizer"] + causes["offload"],
        "other": causes["fixed"],
    }
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _waits(causes: Mapping[str, float], data: str) -> dict[str, float]:
    """What is predicted to travel while nothing is computed. Ranks are predicted to arrive together."""
    axes = {"tp": "tp", "cp": "cp", "ep": "ep", "pp": "pp", "dp": data}
    return {f"{axis}.wire": causes[cause] for cause, axis in axes.items()}
