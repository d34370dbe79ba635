"""Predict the messages that one rank hands to torch.distributed in a steady optimizer step, axis by axis.

A cost model gives volumes on the wire, for layers that are all alike. This file predicts the messages that
`shoal.comm.traffic_counter` counts, call by call and byte by byte, for this model and this plan. The two must be
*equal*. Beside the textbook (P parameters, N ranks, m microbatches, S bytes of
an activation, L layers; a message counts whole):

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
| cp, ring              | m L (c - 1) x 2 keys and values,    | gradients in at least float32; recomputed  |
|                       | and as much again with gradients    | blocks go round once more                  |
| cp, ulysses           | m L x 2 x (q, k, v and output)      | key/value heads repeated up to c of them   |
| ep                    | m L x 4 x rows of k experts a token | how many go to each expert; loads of all   |

With cp every S is that of T/c tokens, parameters are shared by dp_shard x cp ranks, called `dp_shard_cp`, and gradients
without sharding averaged over `dp_cp`; experts that ep divides are shared by the ranks of `edp`.

Steady: the third step and all after it. The first ones also greet neighbours (pp) and agree on buckets (DDP). How many
rows arrive at a rank's experts depends on what they are: predicted is the mean, which is right in the sum over an ep
group, and nothing where capacity drops rows or experts choose. Not predicted: evaluation, layers that a model's author
has split, `find_unused_parameters`, parameters offloaded without sharding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from shoal.blueprint import placement as rules
from shoal.blueprint.context_parallel import ring_elements, ulysses_elements
from shoal.blueprint.model_shapes import (
    AttentionSite,
    DispatchSite,
    ModelShapes,
    RouterSite,
    Shape,
    Sizes,
    TPBoundary,
)
from shoal.blueprint.plan import Plan
from shoal.predict.exact.data_traffic import over_replicas, over_shards
from shoal.predict.exact.step import Message, Step

HOST_BYTES = 8
"""A number that travels for control is a float64; the load of an expert, too."""
KINDS_OF_LOSS = 4
"""Which of them each rank has seen (`train.loss.deferred_count.agree_on_kind`)."""
DEFERRED_NUMBERS = 4
"""The loss, its count and two flags (`train.loss.deferred_count.agree`), or what `reject_uncounted` compares."""
COUNT_BYTES = 8
"""How often the tokens of a sequence chose an expert is an int64."""
ROWS_BYTES = 4
"""How many rows go to an expert is an int32."""


class Messages(NamedTuple):
    """Collectives of one kind on one axis."""

    calls: int | None
    """None: not predicted. How DDP forms its buckets depends on the order in which gradients arrive."""
    bytes: int | None
    """None: not predicted, since it depends on values."""


Operations = dict[str, Messages]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTraffic:
    """How ranks learn the loss and the weight of a batch."""

    splits_logits: bool = True
    """The loss is shoal's cross-entropy, which never joins the logits of tp ranks; a loss of the user's own does."""

    host_numbers: int = 2
    """How many numbers (weight and samples of the batch, signals) ranks agree on over the group of all; 0 where a group
    of the host's own carries them, as beside NCCL. (`shoal train` on a CPU sends them with the loss, or through shared
    memory, where the dataset knows how many labels count.)"""

    defers_count: bool = False
    """The loss is the user's function, whose count is known after its forward and is summed over all ranks with the
    loss."""

    compares_samples: bool = False
    """That count is never known, and ranks compare the shapes of their samples."""

    @property
    def is_own(self) -> bool:
        """Whether the loss is a function of the user's."""
        return self.defers_count or self.compares_samples or not self.splits_logits


OF_SHOAL = LossTraffic()
"""That of shoal's own cross-entropy."""


def traffic(
    plan: Plan,
    shapes: ModelShapes,
    *,
    batch: int,
    rank: int,
    sizes: Sizes | None = None,
    loss: LossTraffic = OF_SHOAL,
) -> dict[str, Operations]:
    """Axis → operation → messages of one rank in one steady step, for a resolved plan and a global batch."""
    step = Step(plan, shapes, batch, rank, sizes or Sizes.of(plan))
    return _added(
        [
            *over_replicas(step),
            *over_shards(step),
            *over_context(step),
            *over_tensor_parallel(step, splits_logits=loss.splits_logits),
            *over_experts(step),
            *over_stages(step),
            *over_world(step, loss),
        ]
    )


def _added(messages: Iterable[Message]) -> dict[str, Operations]:
    total: dict[str, Operations] = {}
    for axis, operation, calls, num_bytes in messages:
        if calls == 0:
            continue
        before = total.setdefault(axis, {}).get(operation, Messages(0, 0))
        more = num_bytes if calls is None or num_bytes is None else calls * num_bytes
        total[axis][operation] = Messages(_plus(before.calls, calls), _plus(before.bytes, more))
    return total


def _plus(known: int | None, more: int | None) -> int | None:
    return None if known is None or more is None else known + more


def inside_block(step: Step, block: str) -> Iterator[Message]:
    """What ranks exchange inside one block in a step, without what routers compare. `over_context`,
    `over_tensor_parallel` and `over_experts` add it up over the blocks of a rank."""
    shapes, layout, prefix = step.shapes, step.plan.layout, f"{block}."
    for attended in shapes.attentions if layout.cp > 1 else ():
        if attended.module.startswith(prefix):
            yield from (_ring if step.plan.context == "ring" else _ulysses)(step, attended)
    for boundary in shapes.tp_boundaries if layout.tp > 1 else ():
        if boundary.module.startswith(prefix):
            yield from _at_boundary(step, boundary, splits_logits=True)
    for dispatched in shapes.dispatches if layout.ep > 1 else ():
        if dispatched.module.startswith(prefix):
            yield from _of_dispatch(step, dispatched)


# ---- context parallelism --------------------------------------------------------------------------------------------


def over_context(step: Step) -> Iterator[Message]:
    """Keys and values round a ring, with their gradients in the backward; or heads for tokens and back."""
    if step.plan.layout.cp == 1:
        return
    for attended in step.shapes.attentions:
        if step.is_here(attended.module):
            yield from (_ring if step.plan.context == "ring" else _ulysses)(step, attended)


def _ring(step: Step, attended: AttentionSite) -> Iterator[Message]:
    rounds = step.plan.layout.cp - 1
    forwards = step.num_forwards(attended.module, is_repeated=attended.is_repeated)
    backwards = step.num_microbatches * attended.has_backward
    elements = ring_elements(step.plan, samples=step.samples, keys=attended.keys)
    for operation in ("send", "recv"):
        yield "cp", operation, rounds * (forwards + backwards), elements * step.sizes.compute
        yield "cp", operation, rounds * backwards, elements * max(4, step.sizes.compute)


def _ulysses(step: Step, attended: AttentionSite) -> Iterator[Message]:
    backwards = step.num_microbatches * attended.has_backward
    there, back = ulysses_elements(step.plan, samples=step.samples, queries=attended.queries, keys=attended.keys)
    for elements, is_repeated in ((there, attended.is_repeated), (back, attended.is_output_repeated)):
        forwards = step.num_forwards(attended.module, is_repeated=is_repeated)
        yield "cp", "all_to_all", forwards + backwards, elements * step.sizes.compute


# ---- tensor parallelism ---------------------------------------------------------------------------------------------


def over_tensor_parallel(step: Step, *, splits_logits: bool) -> Iterator[Message]:
    """Activations over the borders of split regions, the loss of split logits, and gradients that are only shares."""
    if step.plan.layout.tp == 1:
        return
    for boundary in step.shapes.tp_boundaries:
        if step.is_here(boundary.module):
            yield from _at_boundary(step, boundary, splits_logits=splits_logits)
    yield from _shares_of_gradients(step)


def _at_boundary(step: Step, boundary: TPBoundary, *, splits_logits: bool) -> Iterator[Message]:
    if boundary.way == "logits":
        yield from _logits(step, boundary.shape, splits_logits=splits_logits)
        return
    size = step.samples * prod(boundary.shape) // step.plan.layout.cp * _size_of(step, boundary)
    forwards = step.num_forwards(boundary.module, is_repeated=boundary.is_repeated)
    backwards = step.num_microbatches * boundary.has_backward
    enters = boundary.way in ("enter", "gather")
    divides = step.splits_tokens and rules.divides_tokens_of(step.shapes.description, boundary.module)
    if boundary.way in ("gather", "share", "divide", "join") and not divides:
        return
    if boundary.way in ("enter_whole", "share"):
        yield "tp", "all_reduce", backwards, size
        return
    if boundary.way in ("divide", "join"):
        yield "tp", "all_gather", forwards if boundary.way == "join" else backwards, size
    elif divides:
        yield "tp", "all_gather", forwards if enters else backwards, size
        yield "tp", "reduce_scatter", backwards if enters else forwards, size
    else:
        yield "tp", "all_reduce", backwards if enters else forwards, size


def _size_of(step: Step, boundary: TPBoundary) -> int:
    """Matrix products come out in the precision of compute; rows of an embedding in that of its weight."""
    is_lookup = f"{boundary.module}.weight" in step.shapes.lookups
    return step.sizes.weight if is_lookup and not step.plan.is_sharded else step.sizes.compute


def _logits(step: Step, shape: Shape, *, splits_logits: bool) -> Iterator[Message]:
    """Cross-entropy of split logits: the maximum, then the sum and the label's own, of every row. Else: all joined."""
    rows, degree, m = step.samples * prod(shape[:-1]) // step.plan.layout.cp, step.plan.layout.tp, step.num_microbatches
    if splits_logits:
        yield "tp", "all_reduce", m, rows * step.sizes.loss
        yield "tp", "all_reduce", m, 2 * rows * step.sizes.loss
    else:
        yield "tp", "all_gather", m, rows * -(-shape[-1] // degree) * degree * step.sizes.compute


def _shares_of_gradients(step: Step) -> Iterator[Message]:
    """All of them summed over tp in one message, once a step; each rank that shares a parameter its own rows."""
    description = step.shapes.description
    trained = [item for part in step.parts for item in step.shapes.trained(part.pieces).items()]
    shares = [
        step.shard_group.own(name, shape)
        for name, shape in trained
        if rules.is_partial(description, name, splits_tokens=step.splits_tokens)
    ]
    if shares:
        yield "tp", "all_reduce", 1, sum(shares) * step.sizes.weight


# ---- experts --------------------------------------------------------------------------------------------------------


def over_experts(step: Step) -> Iterator[Message]:
    """Tokens to their experts and back, and what routers have to know of the rest of a sequence."""
    for dispatched in step.shapes.dispatches if step.plan.layout.ep > 1 else ():
        if step.is_here(dispatched.module):
            yield from _of_dispatch(step, dispatched)
    for router in step.shapes.routers:
        if step.is_here(router.module):
            yield from _of_router(step, router)


def _of_dispatch(step: Step, dispatched: DispatchSite) -> Iterator[Message]:
    layout = step.plan.layout
    parts = layout.cp * (layout.tp if step.splits_tokens else 1)
    size = step.samples * dispatched.rows // parts * dispatched.dim * step.sizes.compute
    forwards = step.num_forwards(dispatched.module, is_repeated=dispatched.is_repeated)
    ways = 2 * forwards + dispatched.num_returns * step.num_microbatches
    yield "ep", "all_to_all", forwards, dispatched.num_experts * ROWS_BYTES
    yield "ep", "all_to_all", ways, size if dispatched.is_predicted else None


def _of_router(step: Step, router: RouterSite) -> Iterator[Message]:
    """Ranks that have parts of the same sequences: how often it chose each expert, and how its tokens compare."""
    names = [axis for axis, is_used in (("cp", step.plan.layout.cp > 1), ("tp", step.splits_tokens)) if is_used]
    if not names:
        return
    axis = "_".join(names)
    forwards = step.num_forwards(router.module, is_repeated=router.is_repeated)
    if router.has_auxiliary:
        yield axis, "all_reduce", forwards, step.samples * router.num_experts * COUNT_BYTES
    if router.gathers_scores:
        yield axis, "all_gather", forwards, None


# ---- pipeline, and everyone -----------------------------------------------------------------------------------------


def over_stages(step: Step) -> Iterator[Message]:
    """Activations to the next stage and gradients to the one before, per microbatch; a tied parameter's gradient."""
    if not step.is_pipeline:
        return
    owners, me = rules.owners(step.plan), step.place["pp"]
    for stage in (part.stage for part in step.parts):
        for neighbour in (stage - 1, stage + 1):
            if 0 <= neighbour < len(owners) and owners[neighbour] != me:  # what goes one way comes back the other
                size = _received_by(step, max(stage, neighbour), len(owners))
                yield "pp", "send", step.num_microbatches, size
                yield "pp", "recv", step.num_microbatches, size
    mine = {name: shape for part in step.parts for name, shape in step.shapes.trained(part.pieces).items()}
    for pair in step.shapes.description.tied:
        here = [name for name in pair if name in mine]
        if len(here) == 1:
            num_bytes = step.shard_group.own(here[0], mine[here[0]]) * step.sizes.weight
            yield "pp", "send", 1, num_bytes
            yield "pp", "recv", 1, num_bytes


def _received_by(step: Step, stage: int, num_stages: int) -> int:
    """Bytes that a stage receives of a microbatch."""
    elements = step.samples * prod(step.shapes.stream)
    if step.shapes.crossings:
        start, _ = rules.stage_bounds(step.shapes, num_stages=num_stages)[stage]
        of_sample, fixed = step.shapes.crossings[start]
        elements = step.samples * of_sample + fixed
    size = elements * step.sizes.compute // step.plan.layout.cp
    return size // step.plan.layout.tp if step.splits_tokens else size  # each tp rank sends its own tokens


def over_world(step: Step, loss: LossTraffic) -> Iterator[Message]:
    """Numbers: what the batch weighs, the loss, the square of the norm where no rank has every gradient, and for every
    router of the model the load of its experts, how much it dropped, and its loss."""
    plan, routers = step.plan, step.shapes.routers
    if plan.layout.world_size == 1:
        return
    if loss.host_numbers:
        yield "world", "all_reduce", 1, HOST_BYTES * loss.host_numbers
    yield "world", "all_reduce", 1, HOST_BYTES * DEFERRED_NUMBERS if loss.defers_count else step.sizes.weight
    if loss.host_numbers and loss.is_own:
        yield "world", "all_reduce", 1, HOST_BYTES * KINDS_OF_LOSS
    if loss.host_numbers and loss.compares_samples:
        yield "world", "all_reduce", 1, HOST_BYTES * DEFERRED_NUMBERS
    if plan.is_sharded or step.is_pipeline or plan.layout.tp > 1:
        # Of shards, the square of the norm, and whether all ranks have used the same parameters.
        yield "world", "all_reduce", 1, 2 * HOST_BYTES if plan.is_sharded else step.sizes.weight
    if routers:
        yield "world", "all_reduce", 1, len(routers) * (max(r.num_experts for r in routers) + 2) * HOST_BYTES
