"""Seconds of messages: between layers (tp, cp, ep), and of gradients and parameters (dp)."""

from __future__ import annotations

from shoal.predict.cluster import Cluster, Link
from shoal.predict.estimate.rank_share import RankShare, StepContext
from shoal.predict.estimate.work import Work, bytes_in
from shoal.predict.framework_profile import FrameworkProfile
from shoal.predict.workload import Workload

CONTENTION = 0.1
"""Of the shorter of two things that overlap, by which the longer takes longer."""

# ---- messages between layers ----------------------------------------------------------------------------------------


def tensor_parallel(workload: Workload, cluster: Cluster, profile: FrameworkProfile, work: Work, again: int) -> float:
    """Four all-reduces of the activations, or with sp, as many pairs of gather and scatter and two gathers more."""
    if work.tp == 1:
        return 0.0
    link, rounds = cluster.link(work.tp, 1), 4 + 2 * again
    size = bytes_in(work.precision) * work.samples * work.sequence / work.cp * workload.hidden
    travel = (2 * rounds + 2) * link.gather(size) if work.sp else rounds * link.reduce(size)
    return profile.tp_exposed * travel + 2 * rounds * (1 + work.sp) * (link.nodes - 1) * profile.crossing


def context_parallel(workload: Workload, cluster: Cluster, work: Work, again: int, attention: float) -> float:
    """Keys and values round a ring, hidden behind attention; or heads exchanged for tokens, never hidden."""
    if work.cp == 1:
        return 0.0
    link, tokens = cluster.link(work.cp, work.tp), work.samples * work.sequence / work.cp
    size = bytes_in(work.precision)
    if work.context == "ulysses":
        features = 2 * (workload.heads + workload.kv_heads) * workload.head_dim / work.tp
        return (2 + again) * link.exchange(size * tokens * features)
    ring = (work.cp - 1) * link.send(2 * size * tokens * workload.kv_heads * workload.head_dim / work.tp) * (3 + again)
    return _exposed(ring, attention, True)


def expert_parallel(workload: Workload, cluster: Cluster, work: Work, again: int) -> float:
    """Tokens to their experts and back, in forward and backward."""
    if work.ep == 1 or not workload.experts:
        return 0.0
    rows = work.samples * work.sequence / work.cp * workload.top_k / work.tp
    part = workload.sparse_layers / workload.layers
    size = bytes_in(work.precision) * rows * workload.hidden
    return part * (4 + 2 * again) * cluster.link(work.ep, work.tp).exchange(size)


# ---- data parallelism -----------------------------------------------------------------------------------------------


def data_parallel(step: StepContext, share: RankShare, *, micro: float, backward: float) -> float:
    """Seconds that gradients and parameters travel while nothing is computed. `micro` is what one microbatch takes, and
    `backward` the part of it in whose shadow they travel."""
    on, cluster, profile, m = step.on, step.cluster, step.profile, step.m
    dense, experts, layers = share.dense, share.experts, share.layers
    if on.replicas * on.shards == 1:
        return 0.0
    window = backward * profile.shadow
    whole = cluster.link(on.replicas * on.shards, on.tp)
    copying = 2 * profile.copies_in_traffic / (cluster.device.bandwidth * cluster.device.streaming)  # seconds of a byte
    if on.zero == 0:
        size = (dense + experts) * max(profile.reduce, on.size) * on.part_sent
        buckets = max(1.0, size / profile.bucket_size)
        travel = buckets * whole.reduce(size / buckets) + copying * size / 2
        return _exposed(travel, window, profile.overlaps_gradients)
    scatter = gather = across = 0.0
    shards = max(1, on.shards // on.ep)
    for numel, link in (
        (dense, cluster.link(on.shards, on.tp)),
        (experts, cluster.link(shards, on.tp * on.ep)),
    ):
        if not numel:
            continue
        more = _more_messages(link, layers * profile.messages)
        scattered, gathered = numel * max(profile.reduce, on.size), numel * max(profile.gather, on.size)
        scatter += link.gather(scattered) + more + copying * scattered
        gather += link.gather(gathered) + more + copying * gathered
        if on.replicas > 1:
            outer = cluster.link(on.replicas, on.tp * on.shards)
            across += outer.reduce(numel * max(profile.reduce, on.size) * on.part_sent / link.degree)
    if on.zero == 3 and on.pp == 1:
        each = _exposed(gather, micro - backward, profile.overlaps_gathers)
        each += _exposed(gather + scatter, backward, profile.overlaps_gathers)
        return m * each + _exposed(across, window, profile.overlaps_gradients)
    if on.zero == 2 and on.pp == 1:
        return m * _exposed(scatter, window, profile.overlaps_gradients) + gather + across
    return _exposed(scatter + across, window, profile.overlaps_gradients) + gather


def _more_messages(link: Link, count: float) -> float:
    """Latency of all messages but the first, which is counted with the bytes."""
    return max(0.0, count - 1) * link.latency_of_gather()


def _exposed(traffic: float, window: float, overlaps: bool) -> float:
    """What shows of traffic that may hide behind computing."""
    if not overlaps:
        return traffic
    return max(0.0, traffic - window) + CONTENTION * min(traffic, window)
