"""Seconds of one optimizer step, by cause, with an interval: predicted, before anything runs.

One microbatch on one stage takes as long as its products, its attention and its element-wise work take on the device,
or as long as the host needs to launch them, whichever is longer; what tp, cp and ep send in between comes on top. The
pipeline makes a step of that: m microbatches at the pace of the slowest stage, and its bubble. Then gradients that were
not sent in the shadow of the last backward, the optimizer, and what every step costs whatever it does.

    product   2MNK / achievable + bytes / bandwidth, which is a roofline with a soft knee
    message   base + steps × latency + bytes / bandwidth of the slowest link (`cluster.Link`)
    shadow    two things that overlap take the longer of both, and the shorter slows the longer down a little
    bubble    closed forms of what `simulate` plays, with stages as unequal as they are

The interval takes each cause to be off by as much as it usually is (`SPREAD`), all of them independently, and
everything together by `COMMON`; both are learnt from the residuals of published runs, and scored by `shoal backtest`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from shoal.blueprint.plan import Plan
from shoal.predict.cluster import Cluster, Device, Link
from shoal.predict.estimate.rank_share import BYTES, Degrees, layers_of_ranks, microbatch, num_microbatches, rank_share
from shoal.predict.framework_profile import SHOAL, FrameworkProfile
from shoal.predict.workload import Workload

CONTENTION = 0.1
"""Of the shorter of two things that overlap, by which the longer takes longer."""
SCORE_BYTES = 9
"""Read and written for one score of eager attention in the forward: product, scale and mask and softmax, product."""
EAGER_PART = 0.6
"""Of the rate of large products that the two products of eager attention reach."""
NARROW_HEADS = 0.36
"""Heads of 64 reach 0.78 of the rate of heads of 128: cuDNN on an H200, from a trace (docs/concepts/gpu.md)."""
USUAL_SEQUENCE = 4096
"""Tokens at which attention kernels reach their part of the rate of products."""
MEASURED_SEQUENCE = 8192
"""Tokens at which `shoal calibrate` measures the rate of attention on a GPU."""
HOST_LINK = 25e9
"""Bytes/s between device and host, where states are offloaded."""
LAUNCH = 8e-6
"""Seconds that the host needs for one kernel of a traced model."""
EIGHTY = 1.2816
"""Standard deviations on either side that hold 80 % of a normal distribution."""
SPREAD = {
    "matmul": 0.10,
    "attention": 0.25,
    "memory_bound": 0.25,
    "head": 0.15,
    "optimizer": 0.4,
    "tp": 0.4,
    "cp": 0.5,
    "ep": 0.5,
    "pp": 0.5,
    "bubble": 0.25,
    "dp": 0.5,
    "host": 0.3,
    "offload": 0.5,
    "fixed": 0.7,
}
"""Relative standard deviation of each cause on machines that were not measured."""
COMMON = 0.10
"""And of everything together: clocks, stragglers, what nobody wrote down."""
MEASURED = 0.5
"""How much narrower an interval is on machines that were measured."""
STRANGER = 2.5
"""And how much wider of a system that nobody has measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one step, by cause; what overlaps counts only where it shows."""

    matmul: float
    attention: float
    memory_bound: float
    head: float
    """The last layer and the loss, where the slowest stage has them."""
    host: float
    """Waiting for kernels to be launched."""
    tp: float
    cp: float
    ep: float
    pp: float
    """Messages between stages."""
    bubble: float
    """Waiting in the pipeline."""
    dp: float
    """Gradients and parameters that travel while nothing is computed."""
    optimizer: float
    offload: float
    fixed: float
    mfu: float
    """Of the datasheet's rate; model FLOPs, attention counted as it is computed."""
    tokens_per_s_per_device: float
    low: float
    high: float
    """Between `low` and `high` it is meant to be in 80 of 100 cases."""

    @property
    def total(self) -> float:
        """All causes."""
        return sum(self.causes().values())

    def causes(self) -> dict[str, float]:
        """Cause → seconds."""
        return {name: getattr(self, name) for name in SPREAD}

    def slower(self, factor: float) -> StepTime:
        """The same with every cause so many times as long."""
        causes = {name: seconds * factor for name, seconds in self.causes().items()}
        rates = {"mfu": self.mfu / factor, "tokens_per_s_per_device": self.tokens_per_s_per_device / factor}
        return replace(self, **causes, **rates, low=self.low * factor, high=self.high * factor)


def step_time(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    *,
    sequence: int,
    global_batch: int,
    habits: FrameworkProfile = SHOAL,
) -> StepTime:
    """Of a resolved plan."""
    if cluster.device.is_host:
        habits = habits.on_host
    on = Degrees.of(plan, habits)
    m, samples = num_microbatches(plan, global_batch), microbatch(plan, global_batch)
    if workload.is_transformer:
        causes = _of_layers(workload, plan, on, cluster, sequence, samples, m, habits)
    else:
        causes = _of_blocks(workload, plan, on, cluster, samples, m, habits)
    total = sum(causes.values())
    variance = COMMON**2 + sum((SPREAD[name] * seconds / total) ** 2 for name, seconds in causes.items())
    is_known = habits.is_known and (habits.is_known_together or cluster.is_measured or cluster.num_devices == 1)
    width = (MEASURED if cluster.is_measured else 1.0) * (1.0 if is_known else STRANGER)
    factor = math.exp(EIGHTY * math.sqrt(variance) * width)
    tokens = global_batch * sequence
    devices = on.replicas * on.shards * on.tp * on.pp
    flops = workload.flops_per_token(sequence) * tokens
    return StepTime(
        **causes,
        mfu=flops / total / devices / cluster.device.peak_rate(plan.precision),
        tokens_per_s_per_device=tokens / total / devices,
        low=total / factor,
        high=total * factor,
    )


def _of_layers(
    workload: Workload,
    plan: Plan,
    on: Degrees,
    cluster: Cluster,
    sequence: int,
    samples: int,
    m: int,
    habits: FrameworkProfile,
) -> dict[str, float]:
    """Seconds of a transformer, by cause."""
    work = Work(on.tp, on.cp, on.ep, on.splits_tokens, samples, sequence, plan.precision, plan.recompute, plan.context)
    layer = layer_pass(workload, cluster, habits, work)
    tokens = samples * sequence / on.cp
    head = head_pass(workload, cluster.device, habits, on.tp, tokens, plan.precision)
    pace = layer.total
    busy = [layers * pace for layers in layers_of_ranks(workload, on.pp, on.v, on.is_v_shaped, habits.cut)]
    home = 0 if on.is_v_shaped else on.pp - 1  # of the head
    busy[home] += head
    slowest = max(busy)
    place = busy.index(slowest)
    passes = (slowest - head * (place == home)) / pace * m
    send = 0.0
    if on.pp > 1:
        boundary = cluster.link(2, on.replicas * on.shards * on.tp)
        send = 2 * boundary.send(tokens * workload.hidden * on.size / (on.tp if on.splits_tokens else 1))
    held = rank_share(workload, 0, tp=on.tp, pp=on.pp, v=on.v, ep=on.ep, is_v_shaped=on.is_v_shaped, habits=habits)
    backward = slowest * (3 if plan.recompute == "full" else 2) / (4 if plan.recompute == "full" else 3)
    owned = held.dense / (on.shards if on.zero else 1) + held.experts / (max(1, on.shards // on.ep) if on.zero else 1)
    device = cluster.device
    return {
        "matmul": layer.matmul * passes,
        "attention": layer.attention * passes,
        "memory_bound": layer.memory * passes,
        "head": head * m * (place == home),
        "host": layer.waiting * passes + actions(plan.schedule, on, m) * habits.host_action * device.host_factor,
        "tp": layer.tp * passes,
        "cp": layer.cp * passes,
        "ep": layer.ep * passes,
        "pp": send * m * on.v,
        "bubble": bubble(plan.schedule or "1f1b", on.pp, on.v, m) * (sum(busy) - slowest + (on.pp - 1) * on.v * send),
        "dp": data_parallel(held.dense, held.experts, on, cluster, habits, m, slowest, backward, held.layers),
        "optimizer": owned * habits.optimizer_traffic / (device.bandwidth * device.streaming),
        "offload": owned * 16 / HOST_LINK if plan.offload != "none" else 0.0,
        "fixed": _launched(habits, cluster) * habits.fixed * device.host_factor,
    }


def _launched(habits: FrameworkProfile, cluster: Cluster) -> float:
    """The part of a measured time to launch a layer that the host needs; on machines that were not measured, all."""
    return habits.host_part if cluster.is_measured else 1.0


def bubble(schedule: str, pp: int, v: int, m: int) -> float:
    """The part of one microbatch's way through all other stages that a schedule waits for.

    A single microbatch has nothing to fill it with but gradients of weights; zbv wants one and a half for each rank.
    """
    if pp == 1:
        return 0.0
    if m == 1:
        return 2 / 3 if schedule in ("zb", "zbv") else 1.0
    if schedule == "zbv":
        return 1 / 6 + max(0.0, 0.5 - m / (3 * pp))
    return {"interleaved": 1 / v, "looped": 1 / v, "zb": 1 / (3 * v), "dualpipev": 1 / 3}.get(schedule, 1.0)


def actions(schedule: str | None, on: Degrees, m: int) -> int:
    """What a rank of a pipeline does in a step: forward and backward of every microbatch on each of its stages, and the
    gradients of weights by themselves where a schedule divides them; and as much as three of those at the start."""
    if on.pp == 1:
        return 0
    return 3 + m * on.v * (3 if schedule in ("zb", "zbv") else 2)


# ---- compute --------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """What one rank computes of one layer."""

    tp: int
    cp: int
    ep: int
    sp: bool
    samples: int
    sequence: int
    precision: str
    recompute: str
    context: str | None


class Pass(NamedTuple):
    """One microbatch through one layer, forward and backward together, in seconds."""

    matmul: float
    attention: float
    memory: float
    tp: float
    cp: float
    ep: float
    host: float

    @property
    def waiting(self) -> float:
        """For the host."""
        return max(0.0, self.host - self.matmul - self.attention - self.memory)

    @property
    def total(self) -> float:
        """All of it."""
        return self.matmul + self.attention + self.memory + self.waiting + self.tp + self.cp + self.ep


@lru_cache(maxsize=2**15)
def layer_pass(workload: Workload, cluster: Cluster, habits: FrameworkProfile, work: Work) -> Pass:
    """One microbatch through one layer, forward and backward."""
    again = 1 if work.recompute == "full" else 0
    attention = _attention(workload, cluster.device, habits, work, again)
    host = _launched(habits, cluster) * (habits.host_forward * (1 + again) + habits.host_backward)
    if work.tp > 1:
        host += habits.host_collective * (6 + 2 * again) + habits.host_scatter * work.tp * work.sp
    return Pass(
        matmul=_products(workload, cluster.device, habits, work) * (3 + again),
        attention=attention,
        memory=_element_wise(workload, cluster.device, habits, work, again),
        tp=_tensor_parallel(workload, cluster, habits, work, again),
        cp=_context_parallel(workload, cluster, work, again, attention),
        ep=_expert_parallel(workload, cluster, work, again),
        host=host * cluster.device.host_factor,
    )


def bytes_in(precision: str) -> float:
    """Of a number that layers hand on."""
    return BYTES.get(precision, 4.0)


@lru_cache(maxsize=2**16)
def product(device: Device, rows: float, columns: float, inner: float, precision: str, efficiency: float) -> float:
    """Seconds of one matrix product."""
    size = 4.0 if precision == "fp32" else 8.0 if precision == "fp64" else 2.0
    traffic = size * (rows * inner + inner * columns + rows * columns)
    compute = 2 * rows * columns * inner / (device.rate(precision) * efficiency)
    return compute + traffic / (device.bandwidth * device.streaming)


def _products(workload: Workload, device: Device, habits: FrameworkProfile, work: Work) -> float:
    """Seconds of the forward's matrix products; the backward has twice as many."""
    h, d, tp = workload.hidden, workload.head_dim, work.tp
    tokens = work.samples * work.sequence / work.cp
    part = workload.sparse_layers / workload.layers

    def seconds(rows: float, columns: float, inner: float) -> float:
        return product(device, rows, columns, inner, work.precision, habits.efficiency)

    def feed_forward(rows: float, width: float) -> float:
        return seconds(rows, (workload.matrices - 1) * width, h) + seconds(rows, h, width)

    if workload.latent is None:
        total = seconds(tokens, (workload.heads + 2 * workload.kv_heads) * d / tp, h)
        total += seconds(tokens, h, workload.heads * d / tp)
    else:
        total = seconds(tokens, workload.attention_parameters / h / tp, h)
    if part < 1:
        total += (1 - part) * feed_forward(tokens, workload.ffn / tp)
    if part:
        rows = tokens * workload.top_k * work.ep / workload.experts / tp  # of one expert
        here = workload.experts / work.ep
        total += part * here * feed_forward(rows, workload.expert_ffn) / habits.expert_efficiency
    if part and workload.shared_ffn:
        total += part * feed_forward(tokens, workload.shared_ffn / tp)
    return total


def _attention(workload: Workload, device: Device, habits: FrameworkProfile, work: Work, again: int) -> float:
    """Seconds of attention itself. A fused backward computes the scores once more."""
    flops = work.samples * work.sequence / work.cp * workload.attention_flops(work.sequence) / work.tp
    wide = "bf16" if work.precision == "fp8" else work.precision
    if habits.attention == "eager":
        scores = work.samples * workload.heads / work.tp * work.sequence**2 / work.cp
        whole = flops * (2 if workload.causal else 1)  # what is masked is computed as well
        forward = whole / (device.rate(wide) * EAGER_PART)
        forward += scores * SCORE_BYTES / (device.bandwidth * device.streaming)
        return forward * (3 + again + (work.recompute == "selective"))
    part = habits.modern_attention_part if device.is_modern else habits.attention_part
    measured = device.attention.get(wide, 0.0) * habits.attention_sustained
    rate = measured or device.rate(wide) * part
    narrow: float = min(1.0, (workload.head_dim / 128) ** NARROW_HEADS)
    ramp = habits.attention_ramp
    short = (1 + ramp / work.sequence) / (1 + ramp / (MEASURED_SEQUENCE if measured else USUAL_SEQUENCE))
    return flops / (rate * narrow) * short * (3.5 + again)


def _element_wise(workload: Workload, device: Device, habits: FrameworkProfile, work: Work, again: int) -> float:
    """Seconds of norms, residuals, rotations and activation functions, and of gradients that add up."""
    part = workload.sparse_layers / workload.layers
    size = bytes_in(work.precision)
    is_cast = size < 4
    passes = habits.passes + is_cast * habits.cast_passes
    ffn_passes = habits.ffn_passes + is_cast * habits.cast_ffn_passes
    elements = passes * workload.hidden / (work.tp if work.sp else 1)
    elements += (1 - part) * ffn_passes * workload.ffn / work.tp
    elements += part * workload.top_k * (6 * workload.hidden + ffn_passes * workload.expert_ffn) / work.tp
    tokens = work.samples * work.sequence / work.cp
    traffic = size * tokens * elements * (2.5 + again + 0.5 * (work.recompute == "selective"))
    plain = workload.attention_parameters + (1 - part) * workload.ffn_parameters
    held = plain / work.tp + part * workload.expert_parameters / work.ep / (work.tp if habits.splits_experts else 1)
    casts = (habits.weight + 2) * held if habits.weight > 2 and work.precision in ("bf16", "fp16", "fp8") else 0.0
    casts += habits.fp8_casts * held if work.precision == "fp8" else 0.0
    return (traffic + 2 * habits.gradient * held + casts) / (device.bandwidth * device.streaming)


@lru_cache(maxsize=2**14)
def head_pass(
    workload: Workload, device: Device, habits: FrameworkProfile, tp: int, tokens: float, precision: str
) -> float:
    """Seconds of the last layer, the loss and their backward, for one microbatch."""
    columns, wide = workload.vocabulary / tp, "bf16" if precision == "fp8" else precision
    compute = 3 * product(device, tokens, columns, workload.hidden, wide, habits.efficiency)
    passes = 8.0 + 32 * habits.copies_in_loss if habits.fused_loss else 3 * habits.logits
    return compute + tokens * columns * passes / (device.bandwidth * device.streaming)


# ---- messages between layers ----------------------------------------------------------------------------------------


def _tensor_parallel(workload: Workload, cluster: Cluster, habits: FrameworkProfile, work: Work, again: int) -> float:
    """Four all-reduces of the activations, or with sp, as many pairs of gather and scatter and two gathers more."""
    if work.tp == 1:
        return 0.0
    link, rounds = cluster.link(work.tp, 1), 4 + 2 * again
    size = bytes_in(work.precision) * work.samples * work.sequence / work.cp * workload.hidden
    travel = (2 * rounds + 2) * link.gather(size) if work.sp else rounds * link.reduce(size)
    return habits.tp_exposed * travel + 2 * rounds * (1 + work.sp) * (link.nodes - 1) * habits.crossing


def _context_parallel(workload: Workload, cluster: Cluster, work: Work, again: int, attention: float) -> float:
    """Keys and values round a ring, in the shadow of attention; or heads exchanged for tokens, in nobody's."""
    if work.cp == 1:
        return 0.0
    link, tokens = cluster.link(work.cp, work.tp), work.samples * work.sequence / work.cp
    size = bytes_in(work.precision)
    if work.context == "ulysses":
        features = 2 * (workload.heads + workload.kv_heads) * workload.head_dim / work.tp
        return (2 + again) * link.exchange(size * tokens * features)
    ring = (work.cp - 1) * link.send(2 * size * tokens * workload.kv_heads * workload.head_dim / work.tp) * (3 + again)
    return _exposed(ring, attention, True)


def _expert_parallel(workload: Workload, cluster: Cluster, work: Work, again: int) -> float:
    """Tokens to their experts and back, in forward and backward."""
    if work.ep == 1 or not workload.experts:
        return 0.0
    rows = work.samples * work.sequence / work.cp * workload.top_k / work.tp
    part = workload.sparse_layers / workload.layers
    size = bytes_in(work.precision) * rows * workload.hidden
    return part * (4 + 2 * again) * cluster.link(work.ep, work.tp).exchange(size)


# ---- data parallelism -----------------------------------------------------------------------------------------------


def data_parallel(
    dense: float,
    experts: float,
    on: Degrees,
    cluster: Cluster,
    habits: FrameworkProfile,
    m: int,
    micro: float,
    backward: float,
    layers: int,
) -> float:
    """Seconds that gradients and parameters travel while nothing is computed. `micro` is what one microbatch takes, and
    `backward` the part of it in whose shadow they travel."""
    if on.replicas * on.shards == 1:
        return 0.0
    window = backward * habits.shadow
    whole = cluster.link(on.replicas * on.shards, on.tp)
    copying = 2 * habits.copies_in_traffic / (cluster.device.bandwidth * cluster.device.streaming)  # seconds of a byte
    if on.zero == 0:
        size = (dense + experts) * max(habits.reduce, on.size) * on.part_sent
        buckets = max(1.0, size / habits.bucket_size)
        travel = buckets * whole.reduce(size / buckets) + copying * size / 2
        return _exposed(travel, window, habits.overlaps_gradients)
    scatter = gather = across = 0.0
    sharers = max(1, on.shards // on.ep)
    for numel, link in (
        (dense, cluster.link(on.shards, on.tp)),
        (experts, cluster.link(sharers, on.tp * on.ep)),
    ):
        if not numel:
            continue
        more = _more_messages(link, layers * habits.messages)
        scattered, gathered = numel * max(habits.reduce, on.size), numel * max(habits.gather, on.size)
        scatter += link.gather(scattered) + more + copying * scattered
        gather += link.gather(gathered) + more + copying * gathered
        if on.replicas > 1:
            outer = cluster.link(on.replicas, on.tp * on.shards)
            across += outer.reduce(numel * max(habits.reduce, on.size) * on.part_sent / link.degree)
    if on.zero == 3 and on.pp == 1:
        each = _exposed(gather, micro - backward, habits.overlaps_gathers)
        each += _exposed(gather + scatter, backward, habits.overlaps_gathers)
        return m * each + _exposed(across, window, habits.overlaps_gradients)
    if on.zero == 2 and on.pp == 1:
        return m * _exposed(scatter, window, habits.overlaps_gradients) + gather + across
    return _exposed(scatter + across, window, habits.overlaps_gradients) + gather


def _more_messages(link: Link, count: float) -> float:
    """Latency of all messages but the first, which is counted with the bytes."""
    return max(0.0, count - 1) * link.latency_of_gather()


def _exposed(traffic: float, window: float, overlaps: bool) -> float:
    """What shows of traffic that may hide behind computing."""
    if not overlaps:
        return traffic
    return max(0.0, traffic - window) + CONTENTION * min(traffic, window)


# ---- traced models --------------------------------------------------------------------------------------------------


def _of_blocks(
    workload: Workload, plan: Plan, on: Degrees, cluster: Cluster, samples: int, m: int, habits: FrameworkProfile
) -> dict[str, float]:
    """Seconds of a traced model, by cause: blocks instead of layers, divided evenly."""
    device, again = cluster.device, 1 if plan.recompute == "full" else 0
    stream = device.bandwidth * device.streaming
    share = samples / on.tp / on.pp
    matmul = sum(block.flops for block in workload.blocks) * share * (3 + again)
    matmul /= device.rate(plan.precision) * habits.efficiency
    memory = sum(block.traffic or 3 * block.saved for block in workload.blocks) * share * (2.5 + again) / stream
    launches = sum(block.kernels for block in workload.blocks) * (3 + again) * LAUNCH * device.host_factor / on.pp
    host = max(0.0, launches - matmul - memory)
    micro = matmul + memory + host
    numel = workload.parameters / on.tp / on.pp
    owned = numel / (on.shards if on.zero else 1)
    return dict.fromkeys(SPREAD, 0.0) | {
        "matmul": matmul * m,
        "memory_bound": memory * m,
        "host": host * m,
        "bubble": bubble(plan.schedule or "1f1b", on.pp, on.v, m) * (on.pp - 1) * micro,
        "dp": data_parallel(numel, 0.0, on, cluster, habits, m, micro, micro * 2 / 3, len(workload.blocks)),
        "optimizer": owned * habits.optimizer_traffic / stream,
        "offload": owned * 16 / HOST_LINK if plan.offload != "none" else 0.0,
        "fixed": _launched(habits, cluster) * habits.fixed * device.host_factor,
    }
