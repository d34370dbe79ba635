"""The plan nearest to one that ran out of memory: fewest changed words, and of these the fastest that fits.

recompute=full          one word
mb=1 zero=3             two words
...                     any plan, by the search of `shoal plan`
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import Plan
from shoal.errors import ShoalError
from shoal.planner.candidates import check_candidate
from shoal.planner.search import MODES, search
from shoal.planner.task import Task
from shoal.predict.estimate.peak_memory import PeakMemory
from shoal.predict.predict import Prediction

Words = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Excess:
    """Memory beside the states that a prediction did not have."""

    factor: float = 1.0
    """Activations and buffers took this many times more. The same is expected of other plans."""
    fixed: float = 0.0
    """Bytes that no plan divides."""

    def expected(self, memory: PeakMemory) -> float:
        """Bytes of tensors, and of their allocator, that a predicted plan is expected to take."""
        return memory.states + beside_states(memory) * self.factor + self.fixed


def beside_states(memory: PeakMemory) -> float:
    """Predicted bytes of activations and buffers, with what the allocator adds."""
    return memory.reserved - memory.states


def nearest_fitting(task: Task, plan: Plan, *, limit: float, excess: Excess) -> Prediction | None:
    """The nearest plan whose tensors take at most `limit` bytes on a rank; None: there is none."""
    words = list(_single_words(task, plan))
    for count in (1, 2, 3):
        fitting = [found for changes in itertools.combinations(words, count) if (found := _tried(task, plan, changes))]
        fitting = [found for found in fitting if excess.expected(found.memory) <= limit]
        if fitting:
            return min(fitting, key=lambda found: found.time.total)
    room = (limit - excess.fixed) / excess.factor + task.cluster.device.context
    best = search(replace(task, max_memory=max(0.0, room)), Plan(precision=plan.precision), keep=1).best
    return best[0] if best else None


def _single_words(task: Task, plan: Plan) -> Iterator[Words]:
    """Single changes that may reduce memory."""
    share = task.global_batch // ((plan.dp_replicate or 1) * (plan.dp_shard or 1))
    yield from ({"mb": size} for size in divisors(share) if size < (plan.mb or 1))
    yield from ({"recompute": mode} for mode in MODES[MODES.index(plan.recompute) + 1 :])
    data_ranks = (plan.dp_replicate or 1) * (plan.dp_shard or 1) * (plan.cp or 1)
    if data_ranks > 1 and (plan.pp or 1) == 1:
        for zero in range((plan.zero or 0) + 1, 4):
            yield {"zero": zero, "dp_replicate": None, "dp_shard": None}
    if plan.offload == "none" and not task.cluster.device.is_host:
        yield {"offload": "optimizer"}


def _tried(task: Task, plan: Plan, changes: tuple[Words, ...]) -> Prediction | None:
    """The prediction of a changed plan; None: two changes are of one word, or a run would reject it."""
    merged: Words = {}
    for change in changes:
        if merged.keys() & change.keys():
            return None
        merged |= change
    try:
        changed = replace(plan, **merged).resolve(task.cluster.num_devices)
        changed.num_microbatches(task.global_batch)
        return None if check_candidate(task, changed) else task.predict(changed)
    except ShoalError:
        return None
