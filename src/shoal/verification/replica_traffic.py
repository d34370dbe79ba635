"""Bytes that replicas send under compression or local SGD, predicted and counted, and whether their weights are equal.

The prediction is the formula of the method for its buckets. Replicas under local SGD synchronise after at most two
steps here: the bytes do not depend on the number of local steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from shoal.blueprint.plan import Plan
from shoal.blueprint.replicas.compress_words import exact_bytes
from shoal.parallel.data.bucket_averager import BucketAverager
from shoal.train.run import Run

MOST_STEPS = 2


@dataclass(frozen=True, slots=True)
class ReplicaTraffic:
    """One synchronisation of replicas, on one rank."""

    axis: str
    every: int
    """Steps between two synchronisations."""
    predicted: int
    """Bytes that this rank sends."""
    counted: int
    has_equal_weights: bool
    """Whether all replicas had the same weights afterwards."""
    sends_weights: bool
    """Whether replicas send weights (local SGD) and not gradients."""


def shortened(plan: Plan) -> Plan:
    """The plan with at most `MOST_STEPS` local steps."""
    synchrony = plan.sync_spec
    if synchrony is None:
        return plan
    return replace(plan, sync=str(replace(synchrony, every=min(synchrony.every, MOST_STEPS))))


def replica_traffic(
    run: Run, plan: Plan, step: Callable[[], object], have_equal_weights: Callable[[], bool]
) -> ReplicaTraffic | None:
    """Bytes that a run of the shortened plan sends in one synchronisation. Every rank calls it. None: there is one
    replica. `plan` is the requested plan; `step` makes a step of the run."""
    composed, every = run.composed, plan.sync_spec.every if plan.sync_spec is not None else 1
    comm_threads = composed.comm_threads
    if comm_threads is None:
        return None
    for _ in range(min(every, MOST_STEPS) if composed.local_sgd is not None else 1):
        step()
    overlap = composed.overlap()
    assert overlap is not None
    averagers = composed.local_sgd.fragments if composed.local_sgd is not None else []
    averagers = [*averagers, *([composed.reducer.averager] if composed.reducer is not None else [])]
    predicted = sum(_predicted(averager, plan, comm_threads.size) for averager in averagers)
    axis = "dp_replicate" if composed.sync_axes == ("dp_replicate",) else plan.gradient_axis
    return ReplicaTraffic(axis, every, predicted, overlap.bytes, have_equal_weights(), composed.local_sgd is not None)


def _predicted(averager: BucketAverager, plan: Plan, replicas: int) -> int:
    total = 0
    for bucket in averager.buckets:
        width = bucket.parameters[0].element_size()
        if plan.compression is not None:
            total += plan.compression.bytes_sent(bucket.state.shapes, replicas, width)
        else:
            total += exact_bytes(sum(map(prod, bucket.state.shapes)) * width, replicas)
    return total
