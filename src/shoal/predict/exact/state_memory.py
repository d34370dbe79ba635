"""Bytes of parameters, gradients and optimizer state that one rank holds at the fullest moment between microbatches.

That moment is after the backward of a microbatch that is not the step's last: gradients have begun to accumulate, and
what stays gathered for the next microbatch is gathered. Activations come on top, and so do, for moments, a unit that is
just being gathered or reduced.

The ZeRO paper counts P parameters on N ranks, weights and gradients of w bytes, K bytes of optimizer state each. What
FSDP2 holds beyond that is the shard, which it keeps beside a gathered copy:

| zero | paper               | here: parameters [1] + gradients [2] + optimizer [3] |
|------|---------------------|------------------------------------------------------|
| 0    | wP + wP + KP        | the same (DDP's buckets, wP, come on top)            |
| 1    | wP + wP + KP/N      | (wP + wP/N) + wP + KP/N                              |
| 2    | wP + wP/N + KP/N    | (wP + wP/N) + wP/N + KP/N                            |
| 3    | wP/N + wP/N + KP/N  | the same                                             |

With the paper's w = 2, K = 12: 16P, 4P + 12P/N, 2P + 14P/N, 16P/N. shoal's weights are the optimizer's own (w = 4 and
K = 8 for Adam), with no second copy in low precision except while gathered: in a plan of lower precision, the gathered
copy is in that precision. In a pipeline parameters stay gathered and gradients whole until the last microbatch, as
under zero=1, whatever the stage.

N are all who share a parameter: the dp_shard x cp ranks, and where ep divides experts, its e-th part of them, each with
P/e. FSDP2 keeps a shard and a gathered copy also where N is 1, as for experts that ep has divided among all.

Rows are divided as FSDP2 divides them: a shard has ceil(rows/N) rows on every rank, also where the last ranks have
nothing to put there; optimizer state has only the rows that are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from shoal.blueprint import placement as rules
from shoal.blueprint.model_shapes import ModelShapes, Sizes
from shoal.blueprint.placement import ShardGroup
from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules.schedule_orders import make_schedule
from shoal.blueprint.schedules.table import Kind


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, by cause."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.parameters + self.gradients + self.optimizer


def memory(
    plan: Plan, shapes: ModelShapes, *, rank: int, sizes: Sizes | None = None, optimizer_states: float = 2
) -> Memory:
    """What a rank will hold under a resolved plan. `optimizer_states`: tensors as large as a parameter that the
    optimizer keeps for it: 2 for Adam, 1 for momentum, 0 for plain SGD. Its numbers per parameter are left out."""
    sizes = sizes or Sizes.of(plan)
    sizes = replace(sizes, frozen=sizes.compute) if shapes.has_adapters else sizes
    return memory_of(plan, held(plan, shapes, rank=rank), sizes, optimizer_states)


def memory_of(plan: Plan, stages: Sequence[Sequence[Alike]], sizes: Sizes, optimizer_states: float) -> Memory:
    """The same of parameters that `held` has found."""
    pieces = [kind for stage in stages for kind in stage]
    trained = [kind for kind in pieces if kind.is_trained]
    is_pipeline, is_sharded = plan.layout.pp > 1, plan.is_sharded
    stays_gathered = is_sharded and (plan.zero != 3 or is_pipeline)  # [1] under pp, until the last microbatch
    has_whole_gradients = is_sharded and (plan.zero == 1 or is_pipeline)
    if has_whole_gradients:  # [2] they add up in the precision in which they will be reduced
        numbers = sum(kind.number for kind in trained if kind.is_number)
        in_units = sum(kind.number * kind.whole for kind in trained if not kind.is_number)
        gradients = in_units * sizes.reduce + numbers * sizes.weight
    else:
        gradients = sum(kind.number * kind.shard for kind in trained) * sizes.weight
    frozen = sizes.weight if sizes.frozen is None else sizes.frozen
    return Memory(
        parameters=sum(kind.number * kind.shard * (sizes.weight if kind.is_trained else frozen) for kind in pieces)
        + stays_gathered * _gathered(stages) * sizes.compute,
        gradients=gradients,
        # [3] of the rows that are there: padding has no optimizer state
        optimizer=round(optimizer_states * sizes.weight * sum(kind.number * kind.own for kind in trained)),
    )


class Alike(NamedTuple):
    """Parameters that are alike in every layer of a stage: how many they are, and elements of one of them."""

    name: str
    """Of the first."""
    number: int
    is_trained: bool
    is_expert: bool
    """Whether only ranks with the same experts share it."""
    whole: int
    """Of the piece that tp and ep leave."""
    shard: int
    """That FSDP2 keeps of it, padded."""
    own: int
    """That are there, and have optimizer state."""
    gathered: int
    is_number: bool = False
    """Whether it has shape (), and so stays whole on every rank."""


def held(plan: Plan, shapes: ModelShapes, *, rank: int) -> list[list[Alike]]:
    """The parameters of each stage of a rank."""
    shard_group = ShardGroup(plan, shapes.description, rank)
    return [_alike(plan, shapes, shard_group, modules) for _, modules in rules.own_stages(plan, shapes, rank)]


def _alike(plan: Plan, shapes: ModelShapes, shard_group: ShardGroup, modules: tuple[str, ...]) -> list[Alike]:
    found = []
    for name, number in shapes.kinds_in(modules).items():
        shape = rules.piece(plan, shapes, name, rank=shard_group.rank)
        whole, degree, is_expert = prod(shape), shard_group.degree(name), shard_group.axis(name) == "edp"
        padded, own = (whole, whole) if degree == 1 else (shard_group.padded(name, shape), shard_group.own(name, shape))
        gathered = padded * degree if shape else 0
        is_trained = shapes.is_trained(name)
        found.append(Alike(name, number, is_trained, is_expert, whole, padded, own, gathered, not shape))
    return found


def has_moment(plan: Plan, *, rank: int, num_microbatches: int) -> bool:
    """Whether a step has that moment on a rank: a forward begins after each of its stages has made a backward.

    >>> plan = Plan.parse("pp=2 1f1b").resolve(2)
    >>> [has_moment(plan, rank=rank, num_microbatches=2) for rank in (0, 1)]
    [False, True]
    """
    if plan.layout.pp == 1 or plan.schedule is None:
        return num_microbatches > 1
    table = make_schedule(plan.schedule, num_ranks=plan.layout.pp, v=plan.v or 1, num_microbatches=num_microbatches)
    order = table.order(plan.layout.coordinate(rank)["pp"])
    actions = [action for slot in order for action in slot.parts]
    without_gradients = {action.stage for action in actions}
    for action in actions:
        if action.kind is Kind.F and not without_gradients:
            return True
        if action.kind in (Kind.B, Kind.W):
            without_gradients.discard(action.stage)
    return False


def _gathered(stages: Iterable[Sequence[Alike]]) -> int:
    """Elements of the gathered copies; of many stages torch keeps only some at a time."""
    each = [sum(kind.number * kind.gathered for kind in stage) for stage in stages]
    return sum(sorted(each)[-rules.GATHERED_STAGES :])
