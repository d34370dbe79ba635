"""Seconds of one microbatch on one rank: products, attention, element-wise work, and the host that launches them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shoal.predict.cluster import Cluster, Device
from shoal.predict.estimate.communication import between_layers
from shoal.predict.estimate.work import Work, bytes_in
from shoal.predict.framework_profile import FrameworkProfile
from shoal.predict.workload import Workload

SCORE_BYTES = 9
"""Read and written for one score of eager attention in the forward: product, scale and mask and softmax, product. An
estimate, which only systems before flash attention need (Narayanan, Korthikanti, BigScience, vTrain). With 7 or 11
bytes, the median error of BigScience's times in `shoal backtest RUNS.csv` is 9.0 or 7.7 % in place of 8.2 %."""
EAGER_PART = 0.6
"""Of the rate of large products that the two products of eager attention reach. An assumption: as fused kernels do
up to Ampere (`attention_part`). With 0.5 or 0.7, the same error is 7.9 or 8.5 %."""
NARROW_HEADS = 0.36
"""Heads of 64 reach 0.78 of the rate of heads of 128: cuDNN on an H200, from a trace that is not kept. The runs with
heads of 64 in benchmarks/results/planner_nvidia-h200_2026-11-15.md (1.1 and 1.5 B) take what it says to 5 %."""
USUAL_SEQUENCE = 4096
"""Tokens at which attention kernels reach their part of the rate of products: the length of the sweep of the
Ultra-Scale Playbook. Only shoal's profile distinguishes lengths (`attention_ramp`)."""
MEASURED_SEQUENCE = 8192
"""Tokens at which `shoal calibrate` measures the rate of attention on a GPU."""


def launched(profile: FrameworkProfile, cluster: Cluster) -> float:
    """The part of a measured time to launch a layer that the host needs; on machines that were not measured, all."""
    return profile.host_part if cluster.is_measured else 1.0


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
def layer_pass(workload: Workload, cluster: Cluster, profile: FrameworkProfile, work: Work) -> Pass:
    """One microbatch through one layer, forward and backward."""
    again = 1 if work.recompute == "full" else 0
    attention = _attention(workload, cluster.device, profile, work, again)
    host = launched(profile, cluster) * (profile.host_forward * (1 + again) + profile.host_backward)
    if work.tp > 1:
        host += profile.host_collective * (6 + 2 * again) + profile.host_scatter * work.tp * work.sp
    tp, cp, ep = between_layers(workload, cluster, profile, work, attention)
    return Pass(
        matmul=_products(workload, cluster.device, profile, work) * (_num_products(workload) + again),
        attention=attention,
        memory=_element_wise(workload, cluster.device, profile, work, again),
        tp=tp,
        cp=cp,
        ep=ep,
        host=host * cluster.device.host_factor,
    )


@lru_cache(maxsize=2**16)
def product(
    device: Device, rows: float, columns: float, inner: float, precision: str, profile: FrameworkProfile
) -> float:
    """Seconds of one matrix product."""
    size = 4.0 if precision == "fp32" else 8.0 if precision == "fp64" else 2.0
    traffic = size * (rows * inner + inner * columns + rows * columns)
    compute = 2 * rows * columns * inner / (device.rate(precision) * profile.efficiency)
    return compute + profile.product_traffic * traffic / (device.bandwidth * device.streaming)


def _num_products(workload: Workload) -> int:
    """Of a layer, as large as that of the forward: it, and the gradients of input and weight, unless that is frozen."""
    return 2 if workload.lora else 3


def _products(workload: Workload, device: Device, profile: FrameworkProfile, work: Work) -> float:
    """Seconds of the forward's matrix products; the backward has twice as many."""
    h, d, tp = workload.hidden, workload.head_dim, work.tp
    tokens = work.samples * work.sequence / work.cp
    part = workload.sparse_layers / workload.layers

    def seconds(rows: float, columns: float, inner: float) -> float:
        return product(device, rows, columns, inner, work.precision, profile)

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
        reached = 1.0 if _fuses_experts(device, profile, work) else profile.expert_efficiency
        total += part * here * feed_forward(rows, workload.expert_ffn) / reached
    if part and workload.shared_ffn:
        total += part * feed_forward(tokens, workload.shared_ffn / tp)
    return total


def _attention(workload: Workload, device: Device, profile: FrameworkProfile, work: Work, again: int) -> float:
    """Seconds of attention itself. A fused backward computes the scores once more."""
    flops = work.samples * work.sequence / work.cp * workload.attention_flops(work.sequence) / work.tp
    wide = "bf16" if work.precision == "fp8" else work.precision
    if profile.attention == "eager":
        scores = work.samples * workload.heads / work.tp * work.sequence**2 / work.cp
        whole = flops * (2 if workload.causal else 1)  # what is masked is computed as well
        forward = whole / (device.rate(wide) * EAGER_PART)
        forward += scores * SCORE_BYTES / (device.bandwidth * device.streaming)
        return forward * (3 + again + (work.recompute == "selective"))
    part = profile.modern_attention_part if device.is_modern else profile.attention_part
    measured = device.attention.get(wide, 0.0) * profile.attention_sustained
    rate = measured or device.rate(wide) * part
    narrow: float = min(1.0, (workload.head_dim / 128) ** NARROW_HEADS)
    ramp = profile.attention_ramp
    short = (1 + ramp / work.sequence) / (1 + ramp / (MEASURED_SEQUENCE if measured else USUAL_SEQUENCE))
    return flops / (rate * narrow) * short * (3.5 + again)  # the backward has five products, the forward two


def _element_wise(workload: Workload, device: Device, profile: FrameworkProfile, work: Work, again: int) -> float:
    """Seconds of norms, residuals, rotations and activation functions, and of gradients that add up."""
    part = workload.sparse_layers / workload.layers
    size = bytes_in(work.precision)
    is_cast = size < 4
    passes = profile.passes + is_cast * profile.cast_passes
    ffn_passes = profile.ffn_passes + is_cast * profile.cast_ffn_passes
    elements = passes * workload.hidden / (work.tp if work.sp else 1)
    elements += (1 - part) * ffn_passes * workload.ffn / work.tp
    is_fused = _fuses_experts(device, profile, work)
    expert_passes = 0.0 if is_fused else ffn_passes
    elements += (
        part * workload.top_k * (profile.row_passes * workload.hidden + expert_passes * workload.expert_ffn) / work.tp
    )
    tokens = work.samples * work.sequence / work.cp
    # The backward reads and writes one and a half times what the forward does: an assumption that `passes` stands on.
    traffic = size * tokens * elements * (2.5 + again + 0.5 * (work.recompute == "selective"))
    start = part * is_fused * profile.fused_experts_start * (1 + again)
    plain = workload.attention_parameters + (1 - part) * workload.ffn_parameters
    held = plain / work.tp + part * workload.expert_parameters / work.ep / (work.tp if profile.splits_experts else 1)
    if workload.lora:
        adapters = profile.adapter_passes * workload.adapter_features / work.tp
        return start + (traffic + size * tokens * adapters * (2.6 + again)) / (device.bandwidth * device.streaming)
    casts = (profile.weight + 2) * held if profile.weight > 2 and work.precision in ("bf16", "fp16", "fp8") else 0.0
    casts += profile.fp8_casts * held if work.precision == "fp8" else 0.0
    return start + (traffic + 2 * profile.gradient * held + casts) / (device.bandwidth * device.streaming)


def _fuses_experts(device: Device, profile: FrameworkProfile, work: Work) -> bool:
    return profile.fuses_experts and device.is_modern and work.ep == 1 and bytes_in(work.precision) == 2


@lru_cache(maxsize=2**14)
def head_pass(
    workload: Workload, device: Device, profile: FrameworkProfile, tp: int, tokens: float, precision: str
) -> float:
    """Seconds of the last layer, the loss and their backward, for one microbatch."""
    columns, wide = workload.vocabulary / tp, "bf16" if precision == "fp8" else precision
    seconds = product(device, tokens, columns, workload.hidden, wide, profile)
    compute = _num_products(workload) * seconds
    passes = 8.0 + 32 * profile.copies_in_loss if profile.fused_loss else 3 * profile.logits
    return compute + tokens * columns * passes / (device.bandwidth * device.streaming)
