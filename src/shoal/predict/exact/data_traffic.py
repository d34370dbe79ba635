"""The messages of data parallelism: gradients over replicas; parameters and gradients over ranks that share them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from shoal.blueprint import placement as rules
from shoal.blueprint.model_shapes import ModelShapes, Shapes, is_in
from shoal.blueprint.placement import StageShapes, Unit
from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules.counts import fetches
from shoal.predict.exact.state_memory import Alike
from shoal.predict.exact.step import Message, Step

BUCKET_BYTES = 25 * 2**20
"""In a pipeline, gradients are averaged over replicas in buckets that are full from this size on: the default of
torch's DDP, `bucket_cap_mb=25`. The runtime reads it here."""


def over_replicas(step: Step) -> Iterator[Message]:
    """Gradients averaged over replicas, once a step: by FSDP2 per unit, by a pipeline in buckets, else by DDP."""
    plan = step.plan
    axis = "dp_replicate" if plan.is_sharded else plan.gradient_axis
    if plan.layout.degree(axis) == 1:
        return
    trained = [shape for part in step.parts for shape in step.shapes.trained(part.pieces).values()]
    if plan.is_sharded:
        for _, _, pieces in _units(step):
            if numel := step.padded(step.shapes.trained(pieces)):
                yield axis, "all_reduce", 1, numel * step.sizes.reduce
    elif step.is_pipeline:
        sizes = _buckets([prod(shape) * step.sizes.weight for shape in trained])
        yield from ((axis, "all_reduce", 1, size) for size in sizes)
    elif trained:
        yield axis, "all_reduce", None, sum(map(prod, trained)) * step.sizes.weight


def over_shards(step: Step) -> Iterator[Message]:
    """Units gathered before they compute, and their gradients reduced and scattered."""
    if not step.plan.is_sharded:
        return
    num_reductions = step.num_microbatches if step.plan.zero != 1 and not step.is_pipeline else 1
    for part, unit, pieces in _units(step):
        axis = step.shard_group.axis(next(iter(pieces)))
        degree = step.plan.layout.degree(axis)
        if degree == 1:  # experts that ep has divided among all
            continue
        yield axis, "all_gather", _num_gathers(step, part, unit), degree * step.padded(pieces) * step.sizes.compute
        if trained := step.shapes.trained(pieces):
            yield axis, "reduce_scatter", num_reductions, degree * step.padded(trained) * step.sizes.reduce
    own = [shape for part in step.parts for shape in step.shapes.trained(part.pieces).values()]
    if numbers := own.count(()):  # parameters of shape (), which FSDP2 does not cut
        yield step.plan.number_axis, "all_reduce", 1, numbers * step.sizes.weight


def _units(step: Step) -> list[tuple[StageShapes, Unit, Shapes]]:
    return [
        (part, unit, pieces)
        for part in step.parts
        for unit, pieces in rules.sharded_units(step.plan, step.shapes, part)
    ]


def _num_gathers(step: Step, part: StageShapes, unit: Unit) -> int:
    """Under zero=3, for every forward and again for every backward; else once, for the whole step."""
    if step.is_pipeline:
        return _num_gathers_of_stage(step, part.stage)
    if step.plan.zero != 3:
        return 1
    is_needed_again = not (unit.is_last or unit.is_root) and _is_in_backward(step, unit)
    return step.num_microbatches * (1 + is_needed_again)


def _is_in_backward(step: Step, unit: Unit) -> bool:
    """Whether the backward reaches a unit, or one after it for which FSDP2 prefetches this one."""
    every = _units(step)
    place = next(i for i, (_, other, _) in enumerate(every) if other == unit)
    reached = every if unit.is_root else every[: place + 1 + step.shapes.prefetched]
    return any(step.shapes.trained(pieces) for _, _, pieces in reached)


def _num_gathers_of_stage(step: Step, stage: int) -> int:
    """Once, unless the rank has more stages than torch keeps gathered: those that compute next."""
    return gathers_of_stages(step.plan, place=step.place["pp"], num_microbatches=step.num_microbatches).get(stage, 1)


def gathers_of_stages(plan: Plan, *, place: int, num_microbatches: int) -> dict[int, int]:
    """Stage → how often the rank at this place of a pipeline gathers it in a step; {}: each once."""
    v = plan.v or 1
    if v <= rules.GATHERED_STAGES:
        return {}
    assert plan.schedule is not None
    return fetches(
        plan.schedule,
        place,
        num_ranks=plan.layout.pp,
        v=v,
        num_microbatches=num_microbatches,
        kept=rules.GATHERED_STAGES,
    )


def _buckets(sizes: Iterable[int]) -> Iterator[int]:
    """The bytes of each bucket: closed as soon as it is full."""
    bucket = 0
    for size in sizes:
        bucket += size
        if bucket >= BUCKET_BYTES:
            yield bucket
            bucket = 0
    if bucket:
        yield bucket


# ---- all units together ---------------------------------------------------------------------------------------------


class Exchanged(NamedTuple):
    """Elements of a rank's parameters that one gather of all units carries, and so does one reduction of gradients."""

    dense: float
    """Shared by all data ranks."""
    experts: float
    """Shared by the ranks that have the same experts; 0 where ep does not divide them."""
    last: float
    """Of `dense`, those that zero=3 does not gather again for the backward."""
    regathered: float = 0.0
    """Those of stages of a pipeline that are let go and gathered again in a step, added up over all times."""


def exchanged(shapes: ModelShapes, stages: Sequence[Iterable[Alike]], gathers: Iterable[int] = ()) -> Exchanged:
    """What `over_replicas` and `over_shards` send of each unit, added up over the stages of a rank. For a model without
    frozen parameters. `gathers`: how often each stage is gathered; (): once."""
    description = shapes.description
    ends = (*description.before_blocks, *description.after_blocks) if description.tied else description.after_blocks
    dense = experts = last = regathered = 0
    for stage, times in zip(stages, tuple(gathers) or (1,) * len(stages), strict=True):
        for alike in stage:
            elements = alike.number * alike.gathered
            regathered += (times - 1) * elements
            if alike.is_expert:
                experts += elements
            else:
                dense += elements
                last += elements if is_in(alike.name, ends) else 0
    return Exchanged(dense, experts, last, regathered)
