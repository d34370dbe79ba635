"""Seconds of messages: between layers (tp, cp, ep), and of gradients and parameters (dp)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shoal.blueprint.plan import Plan
from shoal.predict.cluster import Cluster, Link
from shoal.predict.estimate.rank_share import Degrees, RankShare, StepContext
from shoal.predict.estimate.work import Work, bytes_in
from shoal.predict.exact.cached_states import exact_exchange
from shoal.predict.exact.data_traffic import Exchanged
from shoal.predict.exact.layer import layer_messages
from shoal.predict.framework_profile import FrameworkProfile
from shoal.predict.workload import Workload

CONTENTION = 0.1
"""Of the shorter of two things that overlap, by which the longer takes longer. An assumption: Calculon has 0.15 under
NVLink and 0.02 under InfiniBand. With 0 or 0.2, the median error of all dense runs in `shoal backtest RUNS.csv` is 8.3
or 8.2 % in place of 8.2 %, and that of llm-foundry on H100 6.7 or 5.4 % in place of 6.0 %."""

# ---- messages between layers ----------------------------------------------------------------------------------------


def between_layers(
    workload: Workload, cluster: Cluster, profile: FrameworkProfile, work: Work, attention: float
) -> tuple[float, float, float]:
    """Seconds of the messages of one microbatch in one layer, over tp, cp and ep. `attention`: seconds that hide a
    ring."""
    if work.tp * work.cp * work.ep == 1:
        return 0.0, 0.0, 0.0
    messages = exact_messages(workload, work) if profile.is_exact else textbook_messages(workload, work)
    tensor, context, expert = (cluster.link(*of) for of in ((work.tp, 1), (work.cp, work.tp), (work.ep, work.tp)))
    copying = _copying(cluster, profile)
    tp = cp = ep = 0.0
    for axis, operation, calls, size, waits in messages:
        if axis == "tp":
            travel = tensor.reduce(size) if operation == "all_reduce" else tensor.gather(size) + copying * size
            tp += calls * (profile.tp_exposed * travel + 2 * waits * (tensor.nodes - 1) * profile.crossing)
        elif axis == "cp":
            cp += calls * (context.send(size) if operation == "send" else context.exchange(size))
        else:
            ep += calls * expert.exchange(size)
    return tp, _exposed(cp, attention, work.context != "ulysses"), ep


class LayerMessages(NamedTuple):
    """Messages that are alike, of one microbatch in one layer."""

    axis: str
    operation: str
    calls: float
    """The mean over all layers, of which only some may have experts."""
    size: float
    """Bytes of each."""
    waits: bool = True
    """Whether ranks wait for each other at the borders of nodes; a gather that was started early does not."""


@lru_cache(maxsize=2**14)
def exact_messages(workload: Workload, work: Work) -> list[LayerMessages]:
    """Those that `verify` proves. Of a pair that receives and sends, the one that sends."""
    plan = Plan(
        dp_replicate=1,
        dp_shard=work.ep,
        cp=work.cp,
        tp=work.tp,
        pp=1,
        ep=work.ep,
        zero=3 if work.ep > 1 else 0,
        v=1,
        mb=work.samples,
        sp=work.sp if work.tp > 1 else None,
        context=(work.context or "ring") if work.cp > 1 else None,  # type: ignore[arg-type]
        recompute=work.recompute,  # type: ignore[arg-type]
        precision=work.precision,  # type: ignore[arg-type]
    )
    found = []
    sparse = workload.sparse_layers / workload.layers
    for is_sparse, part in ((False, 1 - sparse), (True, sparse)):
        if part:
            for axis, operation, calls, size in layer_messages(
                workload, plan, samples=work.samples, sequence=work.sequence, is_sparse=is_sparse
            ):
                if operation != "recv" and calls:
                    found.append(LayerMessages(axis, operation, part * calls, float(size or 0)))
    if workload.latent is not None:  # no model of shoal has such an attention: its keys and values are the textbook's
        found += [each for each in textbook_messages(workload, work) if each.axis == "cp"]
    return found


def textbook_messages(workload: Workload, work: Work) -> list[LayerMessages]:
    """Those of other systems, whose sources say no more than the textbook.

    tp    four all-reduces of the activations, or with sp, as many pairs of gather and scatter and two gathers more
    cp    keys and values round a ring; or heads exchanged for tokens
    ep    tokens to their experts and back, in forward and backward
    """
    again = 1 if work.recompute == "full" else 0
    tokens = bytes_in(work.precision) * work.samples * work.sequence / work.cp
    rounds, found = 4 + 2 * again, []
    if work.tp > 1:
        size = tokens * workload.hidden
        if work.sp:
            found.append(LayerMessages("tp", "all_gather", rounds, size))
            found.append(LayerMessages("tp", "reduce_scatter", rounds, size))
            found.append(LayerMessages("tp", "all_gather", 2, size, waits=False))
        else:
            found.append(LayerMessages("tp", "all_reduce", rounds, size))
    if work.cp > 1 and work.context == "ulysses":
        features = 2 * (workload.heads + workload.kv_heads) * workload.head_dim / work.tp
        found.append(LayerMessages("cp", "all_to_all", 2 + again, tokens * features))
    elif work.cp > 1:
        keys = 2 * workload.kv_heads * workload.head_dim / work.tp
        found.append(LayerMessages("cp", "send", (work.cp - 1) * (3 + again), tokens * keys))
    if work.ep > 1 and workload.experts:
        part, rows = workload.sparse_layers / workload.layers, tokens * workload.top_k / work.tp
        found.append(LayerMessages("ep", "all_to_all", part * (4 + 2 * again), rows * workload.hidden))
    return found


# ---- data parallelism -----------------------------------------------------------------------------------------------


def data_parallel(step: StepContext, share: RankShare, *, micro: float, backward: float) -> float:
    """Seconds that gradients and parameters travel while nothing is computed. `micro` is what one microbatch takes, and
    `backward` the part of it in whose shadow they travel."""
    on, cluster, profile, trained = step.on, step.cluster, step.profile, step.workload.trained_part
    if on.replicas * on.shards == 1:
        return 0.0
    sent = exchange_of(step, share)
    window = backward * profile.shadow
    reduced, gathered = max(profile.reduce, on.size), max(profile.gather, on.size)  # bytes of an element
    copying = _copying(cluster, profile)
    if on.zero == 0:
        size = (sent.dense + sent.experts) * trained * reduced * on.part_sent
        buckets = max(1.0, size / profile.bucket_size)
        travel = buckets * cluster.link(on.replicas * on.shards, on.tp).reduce(size / buckets) + copying * size / 2
        return _exposed(travel, window, profile.overlaps_gradients)
    scatter = gather = again = across = 0.0
    for numel, last, link in (
        (sent.dense, sent.last, cluster.link(on.shards, on.tp)),
        (sent.experts, 0, cluster.link(max(1, on.shards // on.ep), on.tp * on.ep)),
    ):
        if not numel:
            continue
        more = _more_messages(link, share.layers * profile.messages)
        scatter += link.gather(numel * trained * reduced) + more + copying * numel * trained * reduced
        gather += link.gather(numel * gathered) + more + copying * numel * gathered
        again += link.gather((numel - last) * gathered) + more + copying * (numel - last) * gathered
        if on.replicas > 1:
            outer = cluster.link(on.replicas, on.tp * on.shards)
            across += outer.reduce(numel * trained * reduced * on.part_sent / link.degree)
    calls = num_exchanges(on, step.m)
    shown = _exposed(across, window, profile.overlaps_gradients)
    if calls.again:
        each = _exposed(gather, micro - backward, profile.overlaps_gathers)
        each += _exposed(again + scatter, backward, profile.overlaps_gathers)
        return calls.again * each + shown
    if calls.scatter > 1:
        return calls.scatter * _exposed(scatter, window, profile.overlaps_gradients) + gather + across
    if sent.regathered:  # stages that are let go, and gathered while others compute
        regather = gather * sent.regathered / (sent.dense + sent.experts)
        gather += _exposed(regather, step.m * micro, profile.overlaps_gathers)
    return _exposed(scatter + across, window, profile.overlaps_gradients) + gather


class Exchanges(NamedTuple):
    """How often a step gathers all parameters, gathers them again for a backward, and scatters all gradients."""

    gather: int
    again: int
    scatter: int


def num_exchanges(on: Degrees, m: int) -> Exchanges:
    """Of a plan that shards, with m microbatches. In a pipeline, what is gathered stays until the step ends."""
    if on.zero == 3 and on.pp == 1:
        return Exchanges(m, m, m)
    return Exchanges(1, 0, m if on.zero == 2 and on.pp == 1 else 1)


def exchange_of(step: StepContext, share: RankShare) -> Exchanged:
    """Elements of parameters that travel. Of shoal they are counted; of others, they are those that a rank holds."""
    workload, on = step.workload, step.on
    if step.profile.is_exact and workload.is_transformer and on.pp * on.v <= workload.layers:
        return exact_exchange(workload, step.plan, num_microbatches=step.m)
    return Exchanged(share.dense, share.experts, 0)


def _copying(cluster: Cluster, profile: FrameworkProfile) -> float:
    """Seconds in which one byte of a gathered or scattered message is copied on its way."""
    return 2 * profile.copies_in_traffic / (cluster.device.bandwidth * cluster.device.streaming)


def _more_messages(link: Link, count: float) -> float:
    """Latency of all messages but the first, which is counted with the bytes."""
    return max(0.0, count - 1) * link.latency_of_gather()


def _exposed(traffic: float, window: float, overlaps: bool) -> float:
    """What shows of traffic that may hide behind computing."""
    if not overlaps:
        return traffic
    return max(0.0, traffic - window) + CONTENTION * min(traffic, window)
