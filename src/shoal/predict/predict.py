"""One prediction behind every number: what a plan needs of a model on a cluster.

`shoal plan`, the lints, `plan: auto` and `shoal backtest` read `predict`. Its states are `exact.state_memory`, the
count that `verify` compares with a run, byte by byte; activations, buffers and seconds are estimates that stand on it.

    states, messages   counted from shapes           exact: verify proves them
    memory             states + activations + ...     estimated: peak of the fullest rank
    time               compute + messages + bubble    estimated, with an interval
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.blueprint.plan import Plan
from shoal.predict.cluster import Cluster
from shoal.predict.estimate.peak_memory import PeakMemory, peak_memory
from shoal.predict.estimate.step_time import StepTime, step_time
from shoal.predict.exact.shapes import shapes_of
from shoal.predict.exact.state_memory import Memory, memory
from shoal.predict.exact.traffic import Operations, traffic
from shoal.predict.framework_profile import FrameworkProfile
from shoal.predict.presets.frameworks import SHOAL
from shoal.predict.workload import Workload


@dataclass(frozen=True, slots=True)
class Prediction:
    """A resolved plan, the memory of its fullest rank and the time of its step."""

    plan: Plan
    memory: PeakMemory
    time: StepTime


def predict(
    plan: Plan,
    model: Workload,
    cluster: Cluster,
    *,
    seq_len: int,
    global_batch: int,
    profile: FrameworkProfile = SHOAL,
) -> Prediction:
    """Memory and time of a resolved plan."""
    return Prediction(
        plan,
        peak_memory(model, plan, cluster, sequence=seq_len, global_batch=global_batch, profile=profile),
        step_time(model, plan, cluster, sequence=seq_len, global_batch=global_batch, profile=profile),
    )


def states(plan: Plan, model: Workload, *, rank: int, optimizer_states: float = 2) -> Memory:
    """Bytes of parameters, gradients and optimizer state on a rank: exact."""
    return memory(plan, shapes_of(model, 1), rank=rank, optimizer_states=optimizer_states)


def messages(plan: Plan, model: Workload, *, rank: int, seq_len: int, global_batch: int) -> dict[str, Operations]:
    """Axis → operation → calls and bytes of a rank in one step: exact."""
    return traffic(plan, shapes_of(model, seq_len), batch=global_batch, rank=rank)
