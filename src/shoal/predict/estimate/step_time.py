"""Seconds of one optimizer step, by cause, with an interval: predicted, before anything runs.

One microbatch on one stage takes as long as its products, its attention and its element-wise work take on the device,
or as long as the host needs to launch them, whichever is longer; what tp, cp and ep send in between comes on top. The
pipeline makes a step of that: m microbatches at the pace of the slowest stage, and its bubble. Then gradients that were
not sent in the shadow of the last backward, the optimizer, and what every step costs whatever it does.

    product   2MNK / achievable + bytes / bandwidth, which is a roofline with a soft knee
    message   base + steps × latency + bytes / bandwidth of the slowest link (`cluster.Link`)
    shadow    two things that overlap take the longer of both, and the shorter slows the longer down a little
    bubble    that of equal stages, simulated (`schedules.counts`), with stages as unequal as they are

The interval takes each cause to be off by as much as it usually is (`SPREAD`), all of them independently, and
everything together by `COMMON`; both are learnt from the residuals of published runs, and scored by `shoal backtest`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules.counts import bubble
from shoal.predict.cluster import Cluster
from shoal.predict.estimate.communication import data_parallel
from shoal.predict.estimate.compute import head_pass, launched, layer_pass
from shoal.predict.estimate.rank_share import (
    Degrees,
    RankShare,
    StepContext,
    layers_of_ranks,
    microbatch,
    num_microbatches,
    rank_share,
)
from shoal.predict.estimate.work import Work
from shoal.predict.framework_profile import FrameworkProfile
from shoal.predict.presets.frameworks import SHOAL
from shoal.predict.workload import Workload

HOST_UPDATE = 3.5e9
"""Parameters/s that AdamW updates in host memory while gradients and weights are copied beside it: 2.31 s for 8.03 B,
by 16 cores for one H200 (benchmarks/results/offload_nvidia-h200_2026-11-18.md). Other hosts differ; none was timed."""
HOST_ROUNDING = 0.7e9
"""The same where moments are stored in bfloat16: 0.75 billion/s for the update of one tensor by those 16 cores."""
HOST_LINK = 55e9
"""Bytes/s between device and host in one direction, of the same result. It matters for `offload=parameters`."""
CROSSINGS = 3
"""How often one parameter crosses the link for each microbatch of `offload=parameters`: its weight for the forward and
for the backward, and its gradient."""
DISK = 2e9
"""Bytes/s that a disk reads while it writes as many. An assumption, of an NVMe disk; no other was timed."""
IN_FILES = 8
"""Bytes of the states of one parameter in files, which are read and written in a step."""
LAUNCH = 8e-6
"""Seconds that the host needs for one kernel of a traced model. An assumption: cost models of others take 5 to 7 µs. It
changes steps whose kernels are that short; on a calibrated machine `host_factor` scales it."""
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
"""Relative standard deviation of each cause on unmeasured machines. Chosen by hand on the residuals of the 3,249
published runs that `shoal backtest RUNS.csv` can predict: their intervals of 80 % hold 85 % of them."""
COMMON = 0.10
"""And of everything together (clocks, stragglers, unpublished settings), chosen on the same runs."""
MEASURED = 0.5
"""How much narrower an interval is on machines that were measured. An assumption; all 22 runs of
benchmarks/results/planner_nvidia-h200_2026-11-15.md are inside of their intervals."""
UNKNOWN_FRAMEWORK = 2.5
"""And how much wider for an unmeasured system: with it, `shoal backtest RUNS.csv --leave-out` covers 69 %."""


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
        """The same with every cause multiplied by `factor`."""
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
    profile: FrameworkProfile = SHOAL,
) -> StepTime:
    """Of a resolved plan."""
    if cluster.device.is_host:
        profile = profile.on_host
    on = Degrees.of(plan, profile)
    m, samples = num_microbatches(plan, global_batch), microbatch(plan, global_batch)
    step = StepContext(workload, plan, on, cluster, sequence, samples, m, profile)
    causes = _of_layers(step) if workload.is_transformer else _of_blocks(step)
    total = sum(causes.values())
    variance = COMMON**2 + sum((SPREAD[name] * seconds / total) ** 2 for name, seconds in causes.items())
    is_known = profile.is_known and (profile.is_known_together or cluster.is_measured or cluster.num_devices == 1)
    width = (MEASURED if cluster.is_measured else 1.0) * (1.0 if is_known else UNKNOWN_FRAMEWORK)
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


def _of_layers(step: StepContext) -> dict[str, float]:
    """Seconds of a transformer, by cause."""
    workload, plan, on, cluster, sequence, samples, m, profile = step
    work = Work(on.tp, on.cp, on.ep, on.splits_tokens, samples, sequence, plan.precision, plan.recompute, plan.context)
    layer = layer_pass(workload, cluster, profile, work)
    tokens = samples * sequence / on.cp
    head = head_pass(workload, cluster.device, profile, on.tp, tokens, plan.precision)
    pace = layer.total
    busy = [layers * pace for layers in layers_of_ranks(workload, on.pp, on.v, on.is_v_shaped, profile.cut)]
    home = 0 if on.is_v_shaped else on.pp - 1  # of the head
    busy[home] += head
    slowest = max(busy)
    place = busy.index(slowest)
    passes = (slowest - head * (place == home)) / pace * m
    send = 0.0
    if on.pp > 1:
        boundary = cluster.link(2, on.replicas * on.shards * on.tp)
        send = 2 * boundary.send(tokens * workload.hidden * on.size / (on.tp if on.splits_tokens else 1))
    held = rank_share(workload, 0, tp=on.tp, pp=on.pp, v=on.v, ep=on.ep, is_v_shaped=on.is_v_shaped, profile=profile)
    backward = slowest * (3 if plan.recompute == "full" else 2) / (4 if plan.recompute == "full" else 3)
    owned = held.dense / (on.shards if on.zero else 1) + held.experts / (max(1, on.shards // on.ep) if on.zero else 1)
    owned *= workload.trained_part
    device = cluster.device
    shards = on.shards if on.zero >= 2 else 1
    accumulated = (m - 1) * (held.dense / shards + held.experts / max(1, shards // on.ep)) * workload.trained_part
    return {
        "matmul": layer.matmul * passes,
        "attention": layer.attention * passes,
        "memory_bound": layer.memory * passes
        + accumulated * profile.accumulation / (device.bandwidth * device.streaming),
        "head": head * m * (place == home),
        "host": layer.waiting * passes + actions(plan.schedule, on, m) * profile.host_action * device.host_factor,
        "tp": layer.tp * passes,
        "cp": layer.cp * passes,
        "ep": layer.ep * passes,
        "pp": send * m * on.v,
        "bubble": _waits(step) * (sum(busy) - slowest + (on.pp - 1) * on.v * send),
        "dp": data_parallel(step, held, micro=slowest, backward=backward),
        **_update(step, owned),
        "fixed": launched(profile, cluster) * profile.fixed * device.host_factor,
    }


def _update(step: StepContext, owned: float) -> dict[str, float]:
    """Seconds of the optimizer: on the device, or on the host with the copies of what is there."""
    device = step.cluster.device
    if step.plan.offload == "none" or device.is_host:
        update = owned * step.profile.optimizer_traffic / (device.bandwidth * device.streaming)
    else:
        update = owned / (HOST_ROUNDING if step.profile.moments < 8 else HOST_UPDATE)
    if step.plan.offload_folder is not None:
        update = max(update, owned * IN_FILES / DISK)
    crossing = step.m * owned * CROSSINGS * step.profile.weight / HOST_LINK
    streamed = crossing if step.plan.offload == "parameters" else 0.0
    is_on_device = step.plan.offload == "none" or (device.is_host and step.plan.offload_folder is None)
    return {"optimizer": update, "offload": 0.0} if is_on_device else {"optimizer": 0.0, "offload": update + streamed}


def _waits(step: StepContext) -> float:
    """The bubble, beside the way of one microbatch through all other ranks of the pipeline."""
    return bubble(step.plan.schedule or "1f1b", num_ranks=step.on.pp, v=step.on.v, num_microbatches=step.m)


def actions(schedule: str | None, on: Degrees, m: int) -> int:
    """What a rank of a pipeline does in a step: forward and backward of every microbatch on each of its stages, and the
    gradients of weights by themselves where a schedule divides them; and as much as three of those at the start, which
    was measured with `host_action` (benchmarks/results/bubble_*)."""
    if on.pp == 1:
        return 0
    return 3 + m * on.v * (3 if schedule in ("zb", "zbv") else 2)


# ---- traced models --------------------------------------------------------------------------------------------------


def _of_blocks(step: StepContext) -> dict[str, float]:
    """Seconds of a traced model, by cause: blocks instead of layers, divided evenly."""
    workload, plan, on, cluster, _, samples, m, profile = step
    device, again = cluster.device, 1 if plan.recompute == "full" else 0
    stream = device.bandwidth * device.streaming
    share = samples / on.tp / on.pp
    matmul = sum(block.flops for block in workload.blocks) * share * (3 + again)
    matmul /= device.rate(plan.precision) * profile.efficiency
    # An assumption: a block moves three times what it saves, and the backward one and a half times the forward.
    memory = sum(block.traffic or 3 * block.saved for block in workload.blocks) * share * (2.5 + again) / stream
    launches = sum(block.kernels for block in workload.blocks) * (3 + again) * LAUNCH * device.host_factor / on.pp
    host = max(0.0, launches - matmul - memory)
    micro = matmul + memory + host
    numel = workload.parameters / on.tp / on.pp
    owned = numel / (on.shards if on.zero else 1)
    held = RankShare(len(workload.blocks), numel, 0.0, 0.0, 0.0)
    return dict.fromkeys(SPREAD, 0.0) | {
        "matmul": matmul * m,
        "memory_bound": memory * m,
        "host": host * m,
        "bubble": _waits(step) * (on.pp - 1) * micro,
        "dp": data_parallel(step, held, micro=micro, backward=micro * 2 / 3),
        **_update(step, owned),
        "fixed": launched(profile, cluster) * profile.fixed * device.host_factor,
    }
