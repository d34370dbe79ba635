"""What one rank will hand to torch.distributed in one steady optimizer step: predicted messages, axis by axis.

A cost model gives volumes that the wire carries, for layers that are all alike. Here it is the very messages that
`shoal.comm.traffic` counts, call by call and byte by byte, for this model and this plan, so that the two can be held
against each other and have to be *equal*. Beside the textbook (P parameters, N ranks, m microbatches, S bytes of an
activation, L layers; a message counts whole):

| axis, plan            | textbook, per step                  | here, in addition                          |
|-----------------------|-------------------------------------|--------------------------------------------|
| dp_replicate, zero=0  | all-reduce P                        |                                            |
| dp_shard, zero=1      | gather P, reduce-scatter P          | dim 0 of all filled up to a multiple of N  |
| dp_shard, zero=2      | gather P, reduce-scatter m P        | the same                                   |
| dp_shard, zero=3      | gather 2 m P, reduce-scatter m P    | the last unit and the root only once       |
| dp_replicate, HSDP    | all-reduce P/N                      | the same filling                           |
| tp, sp=off            | m x 4 L all-reduces of S            | embedding, head, two messages of the loss  |
| tp, sp=on             | the same as gather + reduce-scatter | and one sum of the gradients of norms      |
| tp, recomputed blocks | m x 2 L more in the forward         | less what no backward of a block needs     |
| pp                    | m x S each way over each boundary   | none inside a rank; a tied parameter once  |

Steady: the third step and all after it. The first ones also greet neighbours (pp) and agree on buckets (DDP). Not
predicted: evaluation, `cp` and `ep`, layers that a model's author has split, `find_unused`, parameters offloaded
without sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from shoal.blueprint import anatomy as rules
from shoal.blueprint.anatomy import Anatomy, Crossing, Part, Shape, Shapes, Sizes, Unit
from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules import make

BUCKET_BYTES = 25 * 2**20
"""In a pipeline, gradients are averaged over replicas in buckets that are full from this size on."""
HOST_BYTES = 8
"""A number that travels for control is a float64."""


class Messages(NamedTuple):
    """Collectives of one kind on one axis."""

    calls: int | None
    """None: not predicted. How DDP forms its buckets depends on the order in which gradients arrive."""
    bytes: int


Operations = dict[str, Messages]


def traffic(
    plan: Plan,
    anatomy: Anatomy,
    *,
    batch: int,
    rank: int,
    sizes: Sizes | None = None,
    splits_logits: bool = True,
    host_numbers: int = 1,
) -> dict[str, Operations]:
    """Axis → operation → messages of one rank in one steady step, for a resolved plan and a global batch.

    `splits_logits`: the loss is shoal's cross-entropy, which never joins the logits of tp ranks; a loss of the user's
    own does. `host_numbers`: how many numbers (weights of the batch, signals) ranks agree on over the group of all;
    0 where a group of the host's own carries them, as beside NCCL.
    """
    step = _Step(plan, anatomy, batch, rank, sizes or Sizes.of(plan))
    added = {
        "dp_replicate": _added(over_replicas(step)),
        "dp_shard": _added(over_shards(step)),
        "tp": _added(over_tensor_parallel(step, splits_logits=splits_logits)),
        "pp": _added(over_stages(step)),
        "world": _added(over_everyone(step, host_numbers=host_numbers)),
    }
    return {axis: operations for axis, operations in added.items() if operations}


@dataclass(frozen=True)
class _Step:
    """One rank in one step: what all formulas ask for."""

    plan: Plan
    anatomy: Anatomy
    batch: int
    rank: int
    sizes: Sizes

    @cached_property
    def place(self) -> Mapping[str, int]:
        return self.plan.layout.coordinate(self.rank)

    @cached_property
    def parts(self) -> list[Part]:
        return rules.parts(self.plan, self.anatomy, self.rank)

    @cached_property
    def num_microbatches(self) -> int:
        return self.plan.num_microbatches(self.batch)

    @property
    def is_sharded(self) -> bool:
        return bool(self.plan.zero) and self.plan.layout.dp_shard > 1

    @property
    def is_pipeline(self) -> bool:
        return self.plan.layout.pp > 1

    def held(self, shape: Shape) -> int:
        """Elements of a piece that this rank keeps after sharding."""
        degree = self.plan.layout.dp_shard if self.is_sharded else 1
        return rules.shard(shape, index=self.place["dp_shard"], degree=degree)

    def padded(self, pieces: Shapes) -> int:
        """Elements of a unit as FSDP2 sends it: dim 0 of every piece is filled up to a multiple of the degree."""
        degree = self.plan.layout.dp_shard
        return degree * sum(rules.padded_shard(shape, degree=degree) for shape in pieces.values())


Message = tuple[str, int | None, int]
"""Operation, how many such calls, bytes of each."""


def _added(messages: Iterable[Message]) -> Operations:
    total: Operations = {}
    for operation, calls, num_bytes in messages:
        before = total.get(operation, Messages(0, 0))
        if calls is None or before.calls is None:
            total[operation] = Messages(None, before.bytes + num_bytes)
        elif calls:
            total[operation] = Messages(before.calls + calls, before.bytes + calls * num_bytes)
    return total


# ---- data parallelism -----------------------------------------------------------------------------------------------


def over_replicas(step: _Step) -> Iterator[Message]:
    """Gradients averaged over replicas, once a step: by FSDP2 per unit, by a pipeline in buckets, else by DDP."""
    if step.plan.layout.dp_replicate == 1:
        return
    trained = [shape for part in step.parts for shape in step.anatomy.trained(part.pieces).values()]
    if step.is_sharded:
        for _, _, pieces in _units(step):
            if numel := step.padded(step.anatomy.trained(pieces)):
                yield "all_reduce", 1, numel // step.plan.layout.dp_shard * step.sizes.reduce
    elif step.is_pipeline:
        yield from (("all_reduce", 1, size) for size in _buckets([prod(s) * step.sizes.weight for s in trained]))
    elif trained:
        yield "all_reduce", None, sum(map(prod, trained)) * step.sizes.weight


def over_shards(step: _Step) -> Iterator[Message]:
    """Units gathered before they compute, and their gradients reduced and scattered."""
    if not step.is_sharded:
        return
    num_reductions = step.num_microbatches if step.plan.zero != 1 and not step.is_pipeline else 1
    for part, unit, pieces in _units(step):
        yield "all_gather", _num_gathers(step, part, unit), step.padded(pieces) * step.sizes.compute
        if trained := step.anatomy.trained(pieces):
            yield "reduce_scatter", num_reductions, step.padded(trained) * step.sizes.reduce


def _units(step: _Step) -> list[tuple[Part, Unit, Shapes]]:
    return [(part, unit, pieces) for part in step.parts for unit, pieces in rules.sharded_units(step.anatomy, part)]


def _num_gathers(step: _Step, part: Part, unit: Unit) -> int:
    """Under zero=3, for every forward and again for every backward; else once, for the whole step."""
    if step.is_pipeline:
        return _num_gathers_of_stage(step, part.stage)
    if step.plan.zero != 3:
        return 1
    is_needed_again = not (unit.is_last or unit.is_root) and _is_in_backward(step, unit)
    return step.num_microbatches * (1 + is_needed_again)


def _is_in_backward(step: _Step, unit: Unit) -> bool:
    """Whether the backward reaches a unit, or the one after it, for which FSDP2 prefetches this one."""
    every = _units(step)
    place = next(i for i, (_, other, _) in enumerate(every) if other == unit)
    reached = every if unit.is_root else every[: place + 2]
    return any(step.anatomy.trained(pieces) for _, _, pieces in reached)


def _num_gathers_of_stage(step: _Step, stage: int) -> int:
    """Once, unless the rank has so many stages that torch lets go of those that are not among the next to compute."""
    plan = step.plan
    if len(step.parts) <= rules.GATHERED_STAGES:
        return 1
    assert plan.schedule is not None
    table = make(plan.schedule, num_ranks=plan.layout.pp, v=plan.v or 1, num_microbatches=step.num_microbatches)
    order = table.order(step.place["pp"])
    num_fetches, is_gathered = 0, False
    for place in range(len(order)):
        coming = dict.fromkeys(action.stage for slot in order[place:] for action in slot.parts)  # each once, in order
        is_next = stage in list(coming)[: rules.GATHERED_STAGES]
        num_fetches += is_next and not is_gathered
        is_gathered = is_next
    return num_fetches


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


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


def over_tensor_parallel(step: _Step, *, splits_logits: bool) -> Iterator[Message]:
    """Activations over the borders of split regions, the loss of split logits, and gradients that are only shares."""
    if step.plan.layout.tp == 1:
        return
    for part in step.parts:
        for crossing in step.anatomy.crossings:
            if any(crossing.module == module or crossing.module.startswith(f"{module}.") for module in part.modules):
                yield from _crossed(step, crossing, splits_logits=splits_logits)
    yield from _shares_of_gradients(step)


def _crossed(step: _Step, crossing: Crossing, *, splits_logits: bool) -> Iterator[Message]:
    samples, m = step.plan.microbatch_size(step.batch), step.num_microbatches
    if crossing.way == "logits":
        yield from _logits(step, samples, crossing.shape, splits_logits=splits_logits)
        return
    size = samples * prod(crossing.shape) * _size_of(step, crossing)
    is_in_block = any(crossing.module.startswith(f"{block}.") for block in step.anatomy.description.blocks)
    is_repeated = step.plan.recompute != "none" and is_in_block and crossing.is_repeated
    forwards, backwards = m * (1 + is_repeated), m * crossing.has_backward
    enters = crossing.way == "enter"
    if rules.splits_tokens(step.plan, step.anatomy.description):
        yield "all_gather", forwards if enters else backwards, size
        yield "reduce_scatter", backwards if enters else forwards, size
    else:
        yield "all_reduce", backwards if enters else forwards, size


def _size_of(step: _Step, crossing: Crossing) -> int:
    """Matrix products come out in the precision of compute; rows of an embedding in that of its weight."""
    is_lookup = f"{crossing.module}.weight" in step.anatomy.lookups
    return step.sizes.weight if is_lookup and not step.is_sharded else step.sizes.compute


def _logits(step: _Step, samples: int, shape: Shape, *, splits_logits: bool) -> Iterator[Message]:
    """Cross-entropy of split logits: the maximum, then the sum and the label's own, of every row. Else: all joined."""
    rows, degree = samples * prod(shape[:-1]), step.plan.layout.tp
    if splits_logits:
        yield "all_reduce", step.num_microbatches, rows * step.sizes.loss
        yield "all_reduce", step.num_microbatches, 2 * rows * step.sizes.loss
    else:
        yield "all_gather", step.num_microbatches, rows * -(-shape[-1] // degree) * degree * step.sizes.compute


def _shares_of_gradients(step: _Step) -> Iterator[Message]:
    """All of them summed over tp in one message, once a step; each rank of dp_shard its own rows."""
    description = step.anatomy.description
    has_tokens_split = rules.splits_tokens(step.plan, description)
    trained = [item for part in step.parts for item in step.anatomy.trained(part.pieces).items()]
    shares = [s for name, s in trained if rules.is_partial(description, name, splits_tokens=has_tokens_split)]
    if shares:
        yield "all_reduce", 1, sum(map(step.held, shares)) * step.sizes.weight


# ---- pipeline, and everyone -----------------------------------------------------------------------------------------


def over_stages(step: _Step) -> Iterator[Message]:
    """Activations to the next stage and gradients to the one before, per microbatch; a tied parameter's gradient."""
    if not step.is_pipeline:
        return
    owners, me = rules.owners(step.plan), step.place["pp"]
    size = step.plan.microbatch_size(step.batch) * prod(step.anatomy.stream) * step.sizes.compute
    if rules.splits_tokens(step.plan, step.anatomy.description):  # each tp rank sends its own tokens
        size //= step.plan.layout.tp
    for stage in (part.stage for part in step.parts):
        for neighbour in (stage - 1, stage + 1):
            if 0 <= neighbour < len(owners) and owners[neighbour] != me:  # what goes one way comes back the other
                yield "send", step.num_microbatches, size
                yield "recv", step.num_microbatches, size
    mine = {name: shape for part in step.parts for name, shape in step.anatomy.trained(part.pieces).items()}
    for pair in step.anatomy.description.tied:
        here = [name for name in pair if name in mine]
        if len(here) == 1:
            num_bytes = step.held(mine[here[0]]) * step.sizes.weight
            yield "send", 1, num_bytes
            yield "recv", 1, num_bytes


def over_everyone(step: _Step, *, host_numbers: int) -> Iterator[Message]:
    """Numbers: what the batch weighs, the loss, and the square of the norm where no rank has every gradient."""
    layout = step.plan.layout
    if layout.world_size == 1:
        return
    if host_numbers:
        yield "all_reduce", 1, HOST_BYTES * host_numbers
    yield "all_reduce", 1, step.sizes.weight
    if step.is_sharded or step.is_pipeline or layout.tp > 1:
        yield "all_reduce", 1, step.sizes.weight
