"""Candidate layouts: every layout of a task's devices whose degrees divide heads, layers, tokens and batch.

`check_plan` has every rule of a run. Here are only the cheap ones, which exclude most layouts early.
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
"""Sequences, an assumption that bounds the search."""
SMALL_MICROBATCH = 2**20
"""Tokens up to which more short sequences than that are tried: a tiny model is faster with few large microbatches."""
LEAST_TOKENS = 512
"""Tokens of a cp rank: below that, attention is not worth dividing. An assumption that bounds the search."""


def layouts(task: Task, required: Plan) -> Iterator[dict[str, Any]]:
    """Yield all legal degrees, with each ZeRO stage, from simple to composed."""
    model, world = task.workload, task.cluster.num_devices
    for tp in degrees_of(world, required.tp, partial(can_split, model)):
        for pp in degrees_of(world // tp, required.pp, partial(can_stage, model)):
            for cp in degrees_of(world // tp // pp, required.cp, partial(can_cut, task, tp)):
                dp = world // (tp * pp * cp)
                if dp <= task.global_batch and task.global_batch % dp == 0:
                    yield from _sharded(task, required, {"tp": tp, "pp": pp, "cp": cp}, dp)


def _sharded(task: Task, required: Plan, chosen: dict[str, int], dp: int) -> Iterator[dict[str, Any]]:
    """Yield all ways to shard parameters over the ranks of dp and cp."""
    shared = dp * chosen["cp"]
    stages = (0,) if shared == 1 else (0, 1) if chosen["pp"] > 1 else (0, 1, 2, 3)
    for zero in stages if required.zero is None else (required.zero,):
        for shard in _groups(dp, zero):
            data = {"dp_shard": shard, "dp_replicate": dp // shard}
            if any(getattr(required, axis) not in (None, degree) for axis, degree in data.items()):
                continue
            for ep in _expert_degrees(task.workload, required.ep, shard * chosen["cp"], zero):
                yield {**chosen, **data, "ep": ep, "zero": zero}


def _groups(dp: int, zero: int) -> list[int]:
    """Return the sizes of shard groups: all data ranks, or any divisor of them with replicas."""
    return [1] if zero == 0 else [size for size in reversed(divisors(dp)) if size > 1 or dp == 1]


def _expert_degrees(model: Workload, required: int | None, shared: int, zero: int) -> list[int]:
    if not model.experts or zero == 0 or model.is_left_out("ep"):
        return [1] if required in (None, 1) else []
    return [ep for ep in divisors(shared) if model.experts % ep == 0 and required in (None, ep)]


def degrees_of(world: int, required: int | None, allows: Callable[[int], bool]) -> list[int]:
    """Return the legal degrees of an axis: the required one, or all that divide the ranks and the model."""
    return [degree for degree in divisors(world) if required in (None, degree) and allows(degree)]


def can_split(model: Workload, tp: int) -> bool:
    """Whether tp divides heads and features. A model that is not a transformer does not say how to split it."""
    if tp == 1:
        return True
    if not model.is_transformer or model.is_left_out("tp"):
        return False
    return not any(size % tp for size in (model.heads, model.kv_heads, model.ffn))


def can_stage(model: Workload, pp: int) -> bool:
    """Whether there is a layer for each stage, in blocks that a pipeline can have."""
    return pp == 1 or (pp <= model.layers and not model.is_left_out("pp"))


def can_cut(task: Task, tp: int, cp: int) -> bool:
    """Whether cp divides the sequence, with enough tokens on each rank."""
    if cp == 1:
        return True
    enough = task.sequence // cp >= LEAST_TOKENS
    is_known = task.workload.is_transformer and not task.workload.is_left_out("cp")
    return is_known and enough and task.sequence % (2 * cp * tp) == 0


def largest_microbatch(task: Task, share: int) -> int:
    """The most samples of a microbatch that are tried. Samples of other models may be small: there, a rank's share."""
    if not task.workload.is_transformer:
        return share
    return max(LARGEST_MICROBATCH, SMALL_MICROBATCH // task.sequence)


def microbatches(share: int, required: int | None, largest: int = LARGEST_MICROBATCH) -> list[int]:
    """Return the microbatch sizes to try: the divisors of a rank's share."""
    if required is not None:
        return [required] if share % required == 0 else []
    return [size for size in divisors(share) if size <= largest]


def check_candidate(task: Task, plan: Plan) -> list[Problem]:
    """Return the problems for which a run would reject a resolved plan."""
    description = task.description or description_of(task.workload)
    return check_plan(plan, description=description, sequence=task.sequence, compiles=task.compiles)


@lru_cache(maxsize=64)
def description_of(model: Workload) -> Description:
    """Describe a model of these dimensions, so that the planner applies the same rules as a run."""
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
