"""What there is to try: every layout of a task's devices whose degrees divide what they have to divide.

`check_plan` has all rules that a run's plan obeys. Here are only those that keep most layouts from being made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

from shoal.blueprint.description import Description, Split
from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.check import check_plan
from shoal.errors import Problem
from shoal.planner.task import Task
from shoal.predict.workload import Workload

LARGEST_MICROBATCH = 128
"""Of sequences; samples of other models may be small, and all that a rank has are tried."""
LEAST_TOKENS = 512
"""Of a cp rank: below that, attention is not worth dividing."""


def layouts(task: Task, wanted: Plan) -> Iterator[dict[str, Any]]:
    """All degrees that divide what they have to divide, with a stage of sharding each; from simple to composed."""
    model, world = task.workload, task.cluster.num_devices
    for tp in degrees_of(world, wanted.tp, partial(can_split, model)):
        for pp in degrees_of(world // tp, wanted.pp, lambda pp: pp <= max(1, model.layers)):
            for cp in degrees_of(world // tp // pp, wanted.cp, partial(can_cut, task, tp)):
                dp = world // (tp * pp * cp)
                if dp <= task.global_batch and task.global_batch % dp == 0:
                    yield from _sharded(task, wanted, {"tp": tp, "pp": pp, "cp": cp}, dp)


def _sharded(task: Task, wanted: Plan, chosen: dict[str, int], dp: int) -> Iterator[dict[str, Any]]:
    """All ways to share parameters among the ranks of dp and cp."""
    shared = dp * chosen["cp"]
    stages = (0,) if shared == 1 else (0, 1) if chosen["pp"] > 1 else (0, 1, 2, 3)
    for zero in stages if wanted.zero is None else (wanted.zero,):
        for shard in _groups(dp, zero):
            data = {"dp_shard": shard, "dp_replicate": dp // shard}
            if any(getattr(wanted, axis) not in (None, degree) for axis, degree in data.items()):
                continue
            for ep in _expert_degrees(task.workload, wanted.ep, shard * chosen["cp"], zero):
                yield {**chosen, **data, "ep": ep, "zero": zero}


def _groups(dp: int, zero: int) -> list[int]:
    """Sizes of groups that share one copy: all data ranks, or any part of them, the rest being replicas."""
    return [1] if zero == 0 else [size for size in reversed(divisors(dp)) if size > 1 or dp == 1]


def _expert_degrees(model: Workload, wanted: int | None, shared: int, zero: int) -> list[int]:
    if not model.experts or zero == 0:
        return [1] if wanted in (None, 1) else []
    return [ep for ep in divisors(shared) if model.experts % ep == 0 and wanted in (None, ep)]


def degrees_of(world: int, wanted: int | None, allows: Callable[[int], bool]) -> list[int]:
    """Degrees of an axis that can be: the one that was asked for, or all that divide the ranks and the model."""
    return [degree for degree in divisors(world) if wanted in (None, degree) and allows(degree)]


def can_split(model: Workload, tp: int) -> bool:
    """Whether tp divides heads and features; models that are not transformers do not say how they could be split."""
    if tp == 1:
        return True
    return model.is_transformer and not any(size % tp for size in (model.heads, model.kv_heads, model.ffn))


def can_cut(task: Task, tp: int, cp: int) -> bool:
    """Whether sequences can be divided so."""
    if cp == 1:
        return True
    enough = task.sequence // cp >= LEAST_TOKENS
    return task.workload.is_transformer and enough and task.sequence % (2 * cp * tp) == 0


def microbatches(share: int, wanted: int | None, largest: int = LARGEST_MICROBATCH) -> list[int]:
    """Sizes to try: those that divide a rank's share."""
    if wanted is not None:
        return [wanted] if share % wanted == 0 else []
    return [size for size in divisors(share) if size <= largest]


def check_candidate(task: Task, plan: Plan) -> list[Problem]:
    """Why a run would refuse a resolved plan."""
    description = task.description or description_of(task.workload)
    return check_plan(plan, description=description, sequence=task.sequence, compiles=task.compiles)


@lru_cache(maxsize=64)
def description_of(model: Workload) -> Description:
    """What a model of these dimensions says of itself; the planner asks the same rules as a run."""
    experts = {"layers.*.experts": Split.EXPERTS} if model.experts else {}
    return Description(
        blocks=tuple(f"layers.{number}" for number in range(model.layers or len(model.blocks))),
        before_blocks=("embedding",),
        after_blocks=("norm", "head"),
        splits={
            "embedding": Split.VOCABULARY,
            "layers.*.norm": Split.SEQUENCE,
            "layers.*.up": Split.COLUMN,
            "layers.*.down": Split.ROW,
            **experts,
            "norm": Split.SEQUENCE,
            "head": Split.VOCABULARY,
        },
        num_heads=model.heads or None,
        num_kv_heads=model.kv_heads or None,
        num_outputs=model.vocabulary or None,
        positions="positions",
        num_experts=model.experts or None,
        active_experts=model.top_k or None,
    )
