"""A planning task: a model, a cluster, a sequence length and a global batch, with the prediction of any plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.bounds import check_bounds
from shoal.errors import raise_if
from shoal.predict.cluster import Cluster
from shoal.predict.estimate.peak_memory import PeakMemory, peak_memory
from shoal.predict.estimate.step_time import StepTime, step_time
from shoal.predict.framework_profile import FrameworkProfile
from shoal.predict.predict import Prediction, predict
from shoal.predict.presets.frameworks import SHOAL
from shoal.predict.workload import Workload

SPARE = 0.05
"""Default fraction of a device's memory that a plan leaves free. An assumption: memory of shoal's runs on an H200 was
predicted to 0.9 % at worst (benchmarks/results/planner_nvidia-h200_2026-11-15.md); the rest is for other shapes."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model to train on a cluster. Numbers that follow from it are predicted."""

    workload: Workload
    cluster: Cluster
    sequence: int
    """Tokens of a sample."""
    global_batch: int
    """Samples of a step, over all ranks."""
    profile: FrameworkProfile = SHOAL
    compiles: bool = True
    """Whether torch.compile captures blocks, which some schedules do not allow."""
    description: Description | None = None
    """The model's description. None: that of a transformer of these dimensions."""
    max_memory: float | None = None
    """Bytes of a device that may be used. None: all but a small part, since predictions are off by some per cent."""

    def __post_init__(self) -> None:
        raise_if(check_bounds([("--seq-len", self.sequence), ("--global-batch", self.global_batch)]))

    @cached_property
    def memory_limit(self) -> float:
        """Bytes that a rank may use."""
        return self.cluster.device.memory * (1 - SPARE) if self.max_memory is None else self.max_memory

    def memory(self, plan: Plan) -> PeakMemory:
        """Predict the peak memory of the fullest rank. A search needs it first, without the time."""
        size, batch = self.sequence, self.global_batch
        return peak_memory(self.workload, plan, self.cluster, sequence=size, global_batch=batch, profile=self.profile)

    def time(self, plan: Plan) -> StepTime:
        """Predict the time of a step of a resolved plan."""
        size, batch = self.sequence, self.global_batch
        return step_time(self.workload, plan, self.cluster, sequence=size, global_batch=batch, profile=self.profile)

    def predict(self, plan: Plan) -> Prediction:
        """Predict both memory and time."""
        size, batch = self.sequence, self.global_batch
        return predict(plan, self.workload, self.cluster, seq_len=size, global_batch=batch, profile=self.profile)

    def saved(self, plan: Plan) -> Saved:
        """Return the size of a checkpoint: weights that are trained, and their moments, each rank its part; of
        replicas, the first writes."""
        total = self.workload.trained_parameters * (self.profile.weight + self.profile.moments)
        layout = plan.layout
        shards = layout.dp_shard * layout.cp if plan.zero else 1
        return Saved(total=total, copied=total / (layout.tp * layout.pp * shards))

    def fits(self, memory: PeakMemory) -> bool:
        """Whether it is within the memory limit of a rank."""
        return memory.total <= self.memory_limit


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes of a checkpoint."""

    total: float
    copied: float
    """Held in the host memory of a rank while it is written: a step waits only for this copy."""
