"""What the sweep of the Ultra-Scale Playbook shows beyond any model: observed on many of its runs, not understood.

None of it is for a single run or cell, and `shoal plan` has none of it. docs/concepts/planner.md says what the figures
of the sweep are without it.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.blueprint.plan import Plan
from shoal.predict.cluster import Cluster
from shoal.predict.estimate.step_time import StepTime
from shoal.predict.workload import Workload

STALL = 1.0
"""Seconds by which each microbatch of a late pipeline of the nanotron sweep is late, whatever the model and the plan.
163 of 171 pipelines of 512 devices are late and half of those of 256; of fewer devices, those whose memory is full, and
at 32 and 64 most of those without ZeRO. No link does that: 1.34B on 128 devices, tp=4 pp=8, takes 3, 40, 0.7 and 12 s
with microbatches of 1, 2, 4 and 8. The script of the sweep (huggingface/nanotron, scripts/scaling_benchmarks.py) does
pipelines again whose result is of a job below 14097150 and keeps all other results, so late ones are likely to be of
before something was mended. The table does not print the job."""


REDUCED = 2.6
"""Seconds that reducing the gradients of 1e9 parameters takes in that sweep on 64 nodes; on 32 nodes a step shows a
tenth of that. Scattering them, as zero=1 does, is as fast as anywhere."""


def late(time: StepTime, workload: Workload, plan: Plan, cluster: Cluster, global_batch: int, fits: bool) -> StepTime:
    """What the nanotron sweep shows beyond any model: observed on many runs of it, not understood."""
    pp, data = plan.pp or 1, (plan.dp_replicate or 1) * (plan.dp_shard or 1)
    more = 0.0
    if _is_late(plan, data, cluster.num_devices) or not fits:  # full memory: the allocator gives back and asks again
        slots = global_batch / data / (plan.mb or 1) + pp - 1
        more += STALL * slots * (pp - 1) / pp
    if not plan.zero and data > 1 and cluster.nodes >= 64:
        more += REDUCED * workload.parameters / 1e9 / (plan.tp or 1) / pp
    grown = 1 + more / time.total
    rates = {"mfu": time.mfu / grown, "tokens_per_s_per_device": time.tokens_per_s_per_device / grown}
    return replace(time, bubble=time.bubble + more, low=time.low * grown, high=time.high * grown, **rates)


def _is_late(plan: Plan, data: int, devices: int) -> bool:
    """Whether most pipelines of such plans are late."""
    if devices >= 256:
        return devices >= 512 or (plan.zero == 1 and ((plan.mb or 1) > 1 or data >= 32))
    return not plan.zero and data > 1 and 32 <= devices < 128


def scatters(tp: int, pp: int, devices: int) -> bool:
    """Whether tp ranks of the nanotron sweep divide tokens, which it does not print. Time and memory of its runs, taken
    together, say so of pipelines on several nodes and of most of its largest runs."""
    return devices > 8 and (pp > 1 or (devices >= 512 and 8 <= tp <= 16))
