"""The part of a model and of a batch on one rank of a plan: degrees, layers of its stages, parameters.

Memory (`peak_memory`) and time (`step_time`) are both predicted from it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shoal.blueprint.partition import partition
from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules.table import V_SHAPED
from shoal.predict.cluster import Cluster
from shoal.predict.framework_profile import Cut, FrameworkProfile
from shoal.predict.workload import Workload

PLENTY = 2**20
"""Microbatches, where the number is not given."""


class Degrees(NamedTuple):
    """The degrees of a plan that say what a rank holds, and how wide its numbers are."""

    tp: int
    pp: int
    cp: int
    ep: int
    v: int
    zero: int
    shards: int
    """Ranks that share one copy of the parameters."""
    replicas: int
    splits_tokens: bool
    is_v_shaped: bool
    size: float
    """Bytes of a number in compute."""
    part_sent: float
    """Fraction of their gradients that replicas send in a step; compression and rare synchronization lower it."""
    kept_for_peers: int
    """Numbers that a rank stores for each parameter: the residual; under `sync=` shared weights and their momentum."""

    @classmethod
    def of(cls, plan: Plan, profile: FrameworkProfile) -> Degrees:
        """Those of a resolved plan."""
        tp, cp = plan.tp or 1, plan.cp or 1
        return cls(
            tp=tp,
            pp=plan.pp or 1,
            cp=cp,
            ep=plan.ep or 1,
            v=plan.v or 1,
            zero=plan.zero or 0,
            shards=(plan.dp_shard or 1) * cp,
            replicas=plan.dp_replicate or 1,
            splits_tokens=tp > 1 and (profile.splits_tokens if plan.sp is None else plan.sp),
            is_v_shaped=plan.schedule in V_SHAPED,
            size=BYTES.get(plan.precision, 4.0),
            part_sent=_part_sent(plan),
            kept_for_peers=_kept_for_peers(plan),
        )


def _part_sent(plan: Plan) -> float:
    part = 1.0 if plan.compression is None else plan.compression.part_sent(plan.dp_replicate or 1)
    return part / (plan.sync_spec.every if plan.sync_spec is not None else 1)


def _kept_for_peers(plan: Plan) -> int:
    if (plan.dp_replicate or 1) == 1:
        return 0
    has_residual = plan.compression is not None and plan.compression.feeds_back
    return has_residual + 2 * (plan.sync is not None)


BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 2.0, "fp64": 8.0}
"""Precision → bytes of an activation; fp8 is for products alone."""


class StepContext(NamedTuple):
    """A step of a plan: the model, the plan in degrees, the machines, and the microbatches."""

    workload: Workload
    plan: Plan
    on: Degrees
    cluster: Cluster
    sequence: int
    samples: int
    """Of a microbatch."""
    m: int
    """Microbatches of a step."""
    profile: FrameworkProfile


def microbatch(plan: Plan, global_batch: int) -> int:
    """Sequences of a microbatch."""
    return plan.mb or max(1, global_batch // ((plan.dp_replicate or 1) * (plan.dp_shard or 1)))


def num_microbatches(plan: Plan, global_batch: int) -> int:
    """Microbatches of a step; a batch that does not come out even has one more that is not full."""
    each = (plan.dp_replicate or 1) * (plan.dp_shard or 1) * microbatch(plan, global_batch)
    return max(1, -(-global_batch // each))


# ---- stages ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2**14)
def layers_of_stages(layers: int, num_stages: int, head: float, cut: Cut) -> tuple[int, ...]:
    """Layers of every stage. `head` is what the last layer and the loss cost, in layers.

    >>> layers_of_stages(8, 4, 2.0, "even"), layers_of_stages(8, 4, 2.0, "balanced")
    ((2, 2, 2, 2), (2, 2, 3, 1))
    """
    if num_stages == 1:
        return (layers,)
    if cut == "balanced" and num_stages <= layers:
        return tuple(len(part) for part in partition([1.0] * layers, num_stages, last=head))
    if cut == "thresholds":  # a layer goes where its share of the whole cost, itself included, falls
        counts = [0] * num_stages
        place = 0
        for number in range(1, layers + 1):
            place += number > (layers + head) * (place + 1) / num_stages
            counts[place] += 1
        return tuple(counts)
    each, more = divmod(layers, num_stages)
    return tuple(each + (stage < more) for stage in range(num_stages))


@lru_cache(maxsize=2**12)
def head_cost(workload: Workload) -> float:
    """What the head costs, in layers: its products beside those of a layer."""
    layers = (workload.active_parameters - workload.head_parameters) / workload.layers
    return round(workload.head_parameters / layers, 2)


@lru_cache(maxsize=2**14)
def layers_of_ranks(workload: Workload, pp: int, v: int, is_v_shaped: bool, cut: Cut) -> tuple[int, ...]:
    """Layers of every rank of the pipeline: stages go around, or down the ranks and back."""
    counts = layers_of_stages(workload.layers, pp * v, head_cost(workload), cut)
    if is_v_shaped:
        return tuple(counts[rank] + counts[2 * pp - 1 - rank] for rank in range(pp))
    return tuple(sum(counts[rank::pp]) for rank in range(pp))


class RankShare(NamedTuple):
    """What a rank of the pipeline holds of the parameters, before dp divides them."""

    layers: int
    dense: float
    """Parameters that all data ranks share."""
    experts: float
    unit: float
    """Parameters of one layer: what is gathered at a time."""
    root: float
    """Parameters of embedding and head, if they are here."""
    end: float = 0.0
    """Those of one of the two."""
    late: float = 0.0
    """Those whose gradients come last: of the first layer, and of an embedding that is not the head."""


@lru_cache(maxsize=2**14)
def rank_share(
    workload: Workload, place: int, *, tp: int, pp: int, v: int, ep: int, is_v_shaped: bool, profile: FrameworkProfile
) -> RankShare:
    """What a rank of the pipeline, of tp and of ep holds."""
    layers = layers_of_ranks(workload, pp, v, is_v_shaped, profile.cut)[place]
    is_first, is_last = place == 0, place == (0 if is_v_shaped else pp - 1)
    sparse = workload.sparse_layers / workload.layers
    router = workload.hidden * workload.experts
    plain = workload.attention_parameters + (1 - sparse) * workload.ffn_parameters
    plain += sparse * (workload.shared_parameters - router)
    layer = plain / tp + workload.small_parameters + sparse * router
    experts = sparse * workload.expert_parameters / ep / (tp if profile.splits_experts else 1)
    rows = -(-workload.vocabulary // (128 * tp)) * 128  # of a rank, filled up
    root = is_first * (rows + workload.positions) * workload.hidden
    root += is_last * (not (workload.tied and is_first)) * rows * workload.hidden
    end = (is_first or is_last) * rows * workload.hidden
    unit = layer + experts
    late = unit + end * (is_first and not (workload.tied and is_last))
    return RankShare(layers, layers * layer + root + is_last * workload.hidden, layers * experts, unit, root, end, late)
