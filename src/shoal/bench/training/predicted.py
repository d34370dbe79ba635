"""The predicted time and memory of a recipe whose plan is resolved, on a given cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shoal.config.recipe import Recipe
from shoal.errors import ShoalError
from shoal.predict.cluster import Cluster
from shoal.train.build_model import build_model, without_memory
from shoal.train.recipe.auto_plan import is_calibrated
from shoal.train.recipe.predict_step import task_for

MESSAGES = ("tp", "cp", "ep", "pp", "dp")
"""Causes of the time of a step that are messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Time and memory of one step; all of it is predicted."""

    seconds: float
    low: float
    high: float
    """The step takes between `low` and `high` seconds in 80 of 100 cases."""
    peak: float
    """Bytes on the fullest rank: of tensors on a GPU, of the process on a CPU, as they are measured."""
    memory: dict[str, float]
    """The same by cause."""
    is_calibrated: bool
    messages: float = 0.0
    """Seconds of the step in which nothing is computed, since messages travel."""

    waiting: float = 0.0
    """Seconds of the step in which a rank waits for other stages of a pipeline, and they compute."""

    @property
    def computation(self) -> float:
        """Seconds without messages."""
        return self.seconds - self.messages

    def with_computation(self, together: float, single: float, ranks: int) -> Predicted:
        """The same with computation that takes `together` times as long where all ranks compute at once, and `single`
        times where one does. Of a pipeline, some wait while others compute. The interval keeps its relative width."""
        idle = self.waiting / self.computation * ranks / max(1, ranks - 1)
        factor = together + min(1.0, idle) * (single - together)
        seconds = self.computation * factor + self.messages
        longer = seconds / self.seconds
        return replace(self, seconds=seconds, low=self.low * longer, high=self.high * longer)

    def to_mapping(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def typical(rounds: Sequence[Predicted | None]) -> Predicted | None:
    """The prediction whose time is the median of several, each for the machine as it was in one round.

    Of an even number, the faster one of the two in the middle.
    """
    known = sorted((each for each in rounds if each is not None), key=lambda each: each.seconds)
    return known[(len(known) - 1) // 2] if known else None


def predict_case(recipe: Recipe, cluster: Cluster, num_hosts: int = 1) -> Predicted | None:
    """Predict a recipe on its ranks of one machine, or of several; None: its model has no known dimensions."""
    model = without_memory(lambda: build_model(recipe.model))
    if model is None:
        return None
    here = replace(cluster, per_node=-(-recipe.plan.layout.world_size // num_hosts), nodes=num_hosts)
    try:
        found = task_for(recipe, model, here).predict(recipe.plan)
    except ShoalError:
        return None
    memory, is_host = found.memory, cluster.device.is_host
    causes = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "other": memory.activations + memory.gathered + memory.buffers + memory.logits,
    }
    if is_host:
        causes["other"] += memory.allocator
        causes["process"] = memory.context
    return Predicted(
        seconds=found.time.total,
        low=found.time.low,
        high=found.time.high,
        peak=sum(causes.values()),
        memory=causes,
        is_calibrated=is_calibrated(here),
        messages=sum(found.time.causes()[name] for name in MESSAGES),
        waiting=found.time.bubble,
    )
