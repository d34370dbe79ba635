"""What replicas send each other under a plan that compresses, or whose islands meet: by the formula of the method, for
the buckets that there are, and as the wire has counted it; and whether all have the same weights afterwards.

Islands are let meet after two steps at most: what they send then does not depend on how long they were on their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from shoal.blueprint.compression import exact_bytes
from shoal.blueprint.plan import Plan
from shoal.parallel.data.bucket_averager import BucketAverager
from shoal.train.run import Run

MOST_STEPS = 2


@dataclass(frozen=True, slots=True)
class ReplicaTraffic:
    """One meeting of replicas, as one rank has seen it."""

    axis: str
    every: int
    """Steps; 1: in each."""
    predicted: int
    """Bytes that this rank sends."""
    counted: int
    alike: bool
    """Whether all replicas had the same weights afterwards."""
    has_islands: bool
    """Whether they have sent weights, and not gradients."""


def shortened(plan: Plan) -> Plan:
    """The plan with islands that meet soon."""
    synchrony = plan.sync_spec
    if synchrony is None:
        return plan
    return replace(plan, sync=str(replace(synchrony, every=min(synchrony.every, MOST_STEPS))))


def replica_traffic(
    run: Run, plan: Plan, step: Callable[[], object], are_alike: Callable[[], bool]
) -> ReplicaTraffic | None:
    """What a run of the hurried plan sends when replicas meet. Every rank calls it. None: there is nobody to meet.
    `plan` is the one that was asked for; `step` makes a step of the run."""
    composed, every = run.composed, plan.sync_spec.every if plan.sync_spec is not None else 1
    comm_threads = composed.comm_threads
    if comm_threads is None:
        return None
    for _ in range(min(every, MOST_STEPS) if composed.islands is not None else 1):
        step()
    overlap = composed.overlap()
    assert overlap is not None
    averagers = composed.islands.fragments if composed.islands is not None else []
    averagers = [*averagers, *([composed.reducer.averager] if composed.reducer is not None else [])]
    predicted = sum(_predicted(averager, plan, comm_threads.size) for averager in averagers)
    axis = "dp_replicate" if composed.meeting_axes == ("dp_replicate",) else plan.gradient_axis
    return ReplicaTraffic(axis, every, predicted, overlap.bytes, are_alike(), composed.islands is not None)


def _predicted(averager: BucketAverager, plan: Plan, replicas: int) -> int:
    total = 0
    for bucket in averager.buckets:
        width = bucket.parameters[0].element_size()
        if plan.compression is not None:
            total += plan.compression.bytes_sent(bucket.state.shapes, replicas, width)
        else:
            total += exact_bytes(sum(map(prod, bucket.state.shapes)) * width, replicas)
    return total
