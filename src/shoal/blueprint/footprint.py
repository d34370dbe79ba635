"""Bytes that the fullest rank will hold at its fullest moment, by cause: predicted, before anything runs.

The fullest rank of a pipeline is its first, which has most microbatches in flight, or its last, which has the logits.
Its fullest moment is the end of a forward, with all activations and the logits; or the backward after it, with the
gradients that are just being reduced; or the end of that, with the gradients of all layers but the first. States
(parameters, gradients, optimizer) are those of `blueprint.memory` in closed form; activations follow Korthikanti et al.
2022, with what each system keeps of them (`habits`). Three numbers are told apart:

    allocated   what tensors take                         torch.cuda.max_memory_allocated
    reserved    and what the allocator holds beside them  torch.cuda.max_memory_reserved
    total       and what lives outside of it              nvidia-smi; what has to fit

Symbols: h hidden, a heads of d features, k key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shoal.blueprint.balance import balance
from shoal.blueprint.cluster import Cluster
from shoal.blueprint.habits import SHOAL, Cut, Habits
from shoal.blueprint.plan import Plan
from shoal.blueprint.schedule_table import V_SHAPED
from shoal.blueprint.workload import Block, Workload

CHUNK = 2.0**31
"""Bytes of logits that exist at a time where the loss is fused: `shoal.numerics.linear_cross_entropy`."""
FEW = CHUNK / 8
"""Bytes of logits below which there is but one chunk."""
CHUNKS = 2
"""Of logits that exist at a time: the next one is computed before the name of the last one is given to it."""
PLENTY = 2**20
"""Microbatches, where nobody says how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes on the fullest rank, by cause."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    """Parameters that are whole for a moment."""
    buffers: float
    """Of collectives, of gradients that are just being reduced, of libraries."""
    logits: float
    allocator: float
    """Reserved, but not allocated."""
    context: float
    """Outside of torch's allocator."""
    stage: int = 0
    """The rank of the pipeline that is fullest."""

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """What tensors take."""
        return self.states + self.activations + self.gathered + self.buffers + self.logits

    @property
    def reserved(self) -> float:
        """What the allocator holds."""
        return self.allocated + self.allocator

    @property
    def total(self) -> float:
        """What has to fit on the device: everything."""
        return self.reserved + self.context


def footprint(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    *,
    sequence: int,
    global_batch: int = 0,
    habits: Habits = SHOAL,
    stage: int | None = None,
) -> Footprint:
    """Of a resolved plan. `global_batch` bounds how many microbatches can be in flight; 0: there are plenty. `stage`:
    of that rank of the pipeline; None: of the fullest."""
    if cluster.device.is_host:
        habits = habits.on_host
    layout = Degrees.of(plan, habits)
    if layout.tp > 1:
        habits = habits.where_split
    m = num_microbatches(plan, global_batch) if global_batch else PLENTY
    samples = microbatch(plan, global_batch)
    if not workload.is_transformer:
        return _of_blocks(workload, plan, layout, cluster, samples, m, habits)
    counts = layers_of_ranks(workload, layout.pp, layout.v, layout.is_v_shaped, habits.cut)
    places = {counts.index(count) for count in counts} | {0, layout.pp - 1}  # of as many layers, the first holds most
    if stage is not None:
        places = {stage}
    found = [_of_rank(workload, plan, layout, cluster, place, samples, m, sequence, habits) for place in places]
    return max(found, key=lambda one: one.allocated)


class Degrees(NamedTuple):
    """The degrees of a plan that say what a rank holds, and how wide its numbers are."""

    tp: int
    pp: int
    cp: int
    ep: int
    v: int
    zero: int
    shards: int
    """Ranks that share one copy of the parameters."""
    replicas: int
    splits_tokens: bool
    is_v_shaped: bool
    size: float
    """Bytes of a number in compute."""

    @classmethod
    def of(cls, plan: Plan, habits: Habits) -> Degrees:
        """Those of a resolved plan."""
        tp, cp = plan.tp or 1, plan.cp or 1
        return cls(
            tp=tp,
            pp=plan.pp or 1,
            cp=cp,
            ep=plan.ep or 1,
            v=plan.v or 1,
            zero=plan.zero or 0,
            shards=(plan.dp_shard or 1) * cp,
            replicas=plan.dp_replicate or 1,
            splits_tokens=tp > 1 and (habits.splits_tokens if plan.sp is None else plan.sp),
            is_v_shaped=plan.schedule in V_SHAPED,
            size=BYTES.get(plan.precision, 4.0),
        )


BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 2.0, "fp64": 8.0}
"""Precision → bytes of an activation; fp8 is for products alone."""


def microbatch(plan: Plan, global_batch: int) -> int:
    """Sequences of a microbatch."""
    return plan.mb or max(1, global_batch // ((plan.dp_replicate or 1) * (plan.dp_shard or 1)))


def num_microbatches(plan: Plan, global_batch: int) -> int:
    """Microbatches of a step; a batch that does not come out even has one more that is not full."""
    each = (plan.dp_replicate or 1) * (plan.dp_shard or 1) * microbatch(plan, global_batch)
    return max(1, -(-global_batch // each))


# ---- stages ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2**14)
def layers_of_stages(layers: int, num_stages: int, head: float, cut: Cut) -> tuple[int, ...]:
    """Layers of every stage. `head` is what the last layer and the loss cost, in layers.

    >>> layers_of_stages(8, 4, 2.0, "even"), layers_of_stages(8, 4, 2.0, "balanced")
    ((2, 2, 2, 2), (2, 2, 3, 1))
    """
    if num_stages == 1:
        return (layers,)
    if cut == "balanced" and num_stages <= layers:
        return tuple(len(part) for part in balance([1.0] * layers, num_stages, last=head))
    if cut == "thresholds":  # a layer goes where its share of the whole cost, itself included, falls
        counts = [0] * num_stages
        place = 0
        for number in range(1, layers + 1):
            place += number > (layers + head) * (place + 1) / num_stages
            counts[place] += 1
        return tuple(counts)
    each, more = divmod(layers, num_stages)
    return tuple(each + (stage < more) for stage in range(num_stages))


@lru_cache(maxsize=2**12)
def head_cost(workload: Workload) -> float:
    """What the head costs, in layers: its products beside those of a layer."""
    layers = (workload.active_parameters - workload.head_parameters) / workload.layers
    return round(workload.head_parameters / layers, 2)


@lru_cache(maxsize=2**14)
def layers_of_ranks(workload: Workload, pp: int, v: int, is_v_shaped: bool, cut: Cut) -> tuple[int, ...]:
    """Layers of every rank of the pipeline: stages go around, or down the ranks and back."""
    counts = layers_of_stages(workload.layers, pp * v, head_cost(workload), cut)
    if is_v_shaped:
        return tuple(counts[rank] + counts[2 * pp - 1 - rank] for rank in range(pp))
    return tuple(sum(counts[rank::pp]) for rank in range(pp))


class Held(NamedTuple):
    """What a rank of the pipeline holds of the parameters, before dp divides them."""

    layers: int
    dense: float
    """Parameters that all data ranks share."""
    experts: float
    unit: float
    """Parameters of one layer: what is gathered at a time."""
    root: float
    """Parameters of embedding and head, if they are here."""
    end: float = 0.0
    """Those of one of the two."""
    late: float = 0.0
    """Those whose gradients come last: of the first layer, and of an embedding that is not the head."""


@lru_cache(maxsize=2**14)
def held_by(
    workload: Workload, place: int, *, tp: int, pp: int, v: int, ep: int, is_v_shaped: bool, habits: Habits
) -> Held:
    """What a rank of the pipeline, of tp and of ep holds."""
    layers = layers_of_ranks(workload, pp, v, is_v_shaped, habits.cut)[place]
    is_first, is_last = place == 0, place == (0 if is_v_shaped else pp - 1)
    sparse = workload.sparse_layers / workload.layers
    router = workload.hidden * workload.experts
    plain = workload.attention_parameters + (1 - sparse) * workload.ffn_parameters
    plain += sparse * (workload.shared_parameters - router)
    layer = plain / tp + workload.small_parameters + sparse * router
    experts = sparse * workload.expert_parameters / ep / (tp if habits.splits_experts else 1)
    rows = -(-workload.vocabulary // (128 * tp)) * 128  # of a rank, filled up
    root = is_first * (rows + workload.positions) * workload.hidden
    root += is_last * (not (workload.tied and is_first)) * rows * workload.hidden
    end = (is_first or is_last) * rows * workload.hidden
    unit = layer + experts
    late = unit + end * (is_first and not (workload.tied and is_last))
    return Held(layers, layers * layer + root + is_last * workload.hidden, layers * experts, unit, root, end, late)


@lru_cache(maxsize=2**14)
def in_flight(schedule: str, place: int, pp: int, v: int, m: int) -> float:
    """Microbatches whose activations a rank of the pipeline holds at most, of all of its layers.

    The closed forms of what `simulate.in_flight` plays; a test holds one against the other.
    """
    if pp == 1:
        return 1.0
    if schedule in ("gpipe", "looped"):
        return float(m)
    if schedule in ("zb", "zbv"):
        return float(min(m, pp))
    if schedule == "dualpipev":
        return min(m, pp + 0.5)
    if v == 1:
        return float(min(m, pp - place))
    return min(m, (pp * (v - 1) + 2 * (pp - place) - 1) / v)


# ---- one rank -------------------------------------------------------------------------------------------------------


def _of_rank(
    workload: Workload,
    plan: Plan,
    on: Degrees,
    cluster: Cluster,
    place: int,
    samples: int,
    m: int,
    sequence: int,
    habits: Habits,
) -> Footprint:
    held = held_by(workload, place, tp=on.tp, pp=on.pp, v=on.v, ep=on.ep, is_v_shaped=on.is_v_shaped, habits=habits)
    tokens = samples * sequence / on.cp
    stream = tokens * workload.hidden * on.size
    layer = tokens * kept_per_token(workload, habits, tp=on.tp, sp=on.splits_tokens, sequence=sequence, size=on.size)
    casts = cast_bytes(workload, habits, on, precision=plan.precision)
    kept, kept_casts, again = layer, casts, 0.0
    if plan.recompute != "none":
        how = recomputed(
            workload, habits, plan.recompute, tp=on.tp, sp=on.splits_tokens, sequence=sequence, size=on.size
        )
        kept, kept_casts, again = tokens * how, 0.0, (layer + casts) * (plan.recompute == "full")
    flying = in_flight(plan.schedule or "1f1b", place, on.pp, on.v, m)
    activations = held.layers * (kept * flying + kept_casts)
    reducing = habits.gradient_copy * (held.dense + held.experts)
    if not habits.is_compiled:
        activations += again  # one layer at a time is computed again,
        reducing += again  # and has gradients
    is_last = place == (0 if on.is_v_shaped else on.pp - 1)
    working = backward_bytes(workload, habits, plan.recompute, tokens=tokens, tp=on.tp, size=on.size)
    messages = message_bytes(workload, habits, on, place=place, is_last=is_last, tokens=tokens, m=m)
    logits = head_gradient = 0.0
    if is_last:
        logits = logit_bytes(workload, habits, tokens=tokens, tp=on.tp, pp=on.pp, size=on.size)
        goes_with_logits = habits.is_compiled and is_fused(habits, tp=on.tp, pp=on.pp)
        activations += (1 if goes_with_logits else 2 + habits.copies_in_norm) * stream  # the last norm
        head_gradient = habits.gradient * held.end * (m == 1 and (on.zero == 0 or on.shards == 1))
    moments = Moments(activations, logits, reducing, working, messages)
    if habits.is_compiled:
        again_beside_input = again - stream if again else 0.0
        moments = moments._replace(
            working=working + again_beside_input + head_gradient,
            ending=(again or kept + kept_casts) + working + stream,
            closing=2 * tokens * workload.hidden * 4,  # the gradient of what was looked up, and the same in order
        )
    return _summed(plan, on, cluster, habits, held, moments, place, m)


class Moments(NamedTuple):
    """Bytes of a rank that are there beside its states: always, or at one of two moments."""

    activations: float
    logits: float = 0.0
    """At the end of the forward."""
    reducing: float = 0.0
    """In the backward: gradients on their way."""
    working: float = 0.0
    """In the backward: what a layer holds for a moment."""
    messages: float = 0.0
    """At any time: buffers of a pipeline and of tp."""
    ending: float = 0.0
    """In the backward of the first layer, when all others have their gradients: what it holds, activations included."""
    closing: float = 0.0
    """In the backward of the embedding, beside all gradients."""


def _summed(
    plan: Plan,
    on: Degrees,
    cluster: Cluster,
    habits: Habits,
    held: Held,
    moments: Moments,
    place: int,
    m: int,
) -> Footprint:
    """States and transients beside activations, at the fuller of two moments."""
    parameters, gradients, optimizer = states(held, on, habits)
    gathered, gathered_late, reducing = transients(held, on, habits, moments.working)
    activations, logits = moments.activations, moments.logits
    reducing += moments.reducing
    buffers = habits.bucket + moments.messages
    if habits.keeps_buckets and m > 1 and on.pp == 1 and on.zero == 0 and on.replicas * on.shards > 1:
        buffers += gradients
    other = logits  # what is there beside activations
    if gathered_late + reducing > gathered + logits:  # the fullest moment is in the backward, when logits have gone
        buffers, logits, gathered = buffers + reducing, 0.0, gathered_late
        other = reducing if habits.is_compiled else 0.0
    if m == 1 and habits.gradients_come_late and (on.zero or on.replicas == 1):
        nearly_all = gradients * (1 - held.late / (held.dense + held.experts))
        gradients = max(0.0, max(nearly_all + moments.ending, gradients + moments.closing) - activations - other)
    if plan.offload != "none":
        optimizer = 0.0
    if plan.offload == "parameters" and on.zero == 3 and on.pp == 1:  # else what is gathered stays on the device
        parameters = gradients = 0.0
    loose = habits.fragmentation + (on.pp > 1) * habits.pipeline_fragmentation
    return Footprint(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        gathered=gathered,
        buffers=buffers,
        logits=logits,
        allocator=loose * (activations + gathered + logits),
        context=cluster.device.context,
        stage=place,
    )


def states(held: Held, on: Degrees, habits: Habits) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer. In a pipeline gradients stay whole, and what FSDP gathers stays."""
    parameters = gradients = optimizer = 0.0
    for numel, sharers in ((held.dense, on.shards), (held.experts, max(1, on.shards // on.ep))):
        divided = sharers if on.zero else 1
        if (
            habits.master == 0 and on.zero and on.shards > 1
        ):  # FSDP: a shard of the optimizer's own, and a gathered copy
            parameters += numel * (habits.weight / divided + on.size * (on.zero < 3 or on.pp > 1))
        else:
            parameters += numel * habits.weight / (divided if on.zero == 3 else 1)
        gradients += numel * habits.gradient / (divided if on.zero >= 2 and on.pp == 1 else 1)
        optimizer += numel * (habits.master + habits.moments) / divided
    return parameters, gradients, optimizer


def transients(held: Held, on: Degrees, habits: Habits, working: float = 0.0) -> tuple[float, float, float]:
    """Bytes of units that are gathered for a moment, at the end of the forward and in the backward; and of gradients
    that are just being reduced then, and what a layer is `working` with."""
    if on.shards == 1 or on.zero < (1 if habits.gathers_ends_alone else 3):
        return 0.0, 0.0, working
    reduced = habits.reduce * max(held.unit, held.end if habits.gathers_ends_alone else held.root / 2)
    gathers = on.zero == 3 and on.pp == 1
    if not habits.gathers_ends_alone:
        gathered = on.size * (2 * held.unit + held.root) * gathers
        return gathered, gathered, max(2 * reduced, reduced + working)
    # A unit is gathered as one buffer, and parameter by parameter. Its gradients are reduced from another buffer, and
    # the next unit is gathered meanwhile; when that one works, those are still on their way.
    unit = on.size * held.unit * gathers
    copies = 2 + (habits.copies_of_messages > 0) * (on.zero > 1) * (1 + 1 / on.shards)
    moments = (2 * unit, copies * reduced), (3 * unit, reduced + working)
    return on.size * 2 * held.end * gathers, *max(moments, key=sum)


# ---- activations ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2**14)
def kept_per_token(
    workload: Workload, habits: Habits, *, tp: int, sp: bool, sequence: int, size: float, has_scores: bool = True
) -> float:
    """Bytes that one layer keeps of one token on one tp rank, without recompute. `has_scores`: those of attention too,
    where it is computed eagerly."""
    h = workload.hidden
    part = workload.sparse_layers / workload.layers
    input_of_norm = (1 - part) * habits.norm_input + part * habits.sparse_norm_input
    between = 2 * input_of_norm * size / 2 * h  # of both norms
    between += 2 * size * h if habits.keeps_normed else 0.0
    between += 2 * 4 if habits.is_lean else 0.0  # what they were divided by
    between += 2 * h if habits.dropout else 0.0
    whole = 2 * size * h if habits.keeps_gathered else 0.0
    inside = _attention_kept(workload, habits, sequence, size, has_scores)
    inside += (1 - part) * _ffn_kept(workload.ffn, workload.gated, habits, size)
    if part:
        expert = 2 * size * h + _ffn_kept(workload.expert_ffn, workload.gated, habits, size)
        if habits.is_lean:  # rows that go in, gate, up and their product; what comes out is summed up and forgotten
            expert = size * (h + (workload.matrices - 1 + workload.gated) * workload.expert_ffn)
            inside += part * size * h  # what rows are made of
        shared = _ffn_kept(workload.shared_ffn, workload.gated, habits, size)
        inside += part * (workload.top_k * expert + shared)
    return between / (tp if sp else 1) + inside / tp + whole


def _attention_kept(workload: Workload, habits: Habits, sequence: int, size: float, has_scores: bool) -> float:
    """Queries, keys, values, what comes out of attention, and its scores or the sums of them."""
    a, k, d = workload.heads, workload.kv_heads, workload.head_dim
    if workload.latent:
        low = workload.latent
        kept = size * a * (2 * (d + low.rope_dim) + 2 * low.value_dim) + size * (low.query_rank + low.key_rank)
    else:
        kept = size * 2 * (a + k) * d
    if habits.attention == "flash":
        return kept + 4 * a
    return kept + (2 * size + 1 if habits.dropout else size) * a * sequence * has_scores


def _ffn_kept(width: int, gated: bool, habits: Habits, size: float) -> float:
    """What goes into the activation function, and what comes out of it."""
    return size * width * (2 + habits.keeps_product + habits.keeps_silu if gated else 2)


@lru_cache(maxsize=2**14)
def recomputed(workload: Workload, habits: Habits, how: str, *, tp: int, sp: bool, sequence: int, size: float) -> float:
    """Bytes that one layer keeps of one token when it recomputes."""
    h, share = workload.hidden, tp if sp else 1
    if how == "full":
        return size * h / share
    if habits.selective == "core":
        return kept_per_token(workload, habits, tp=tp, sp=sp, sequence=sequence, size=size, has_scores=False)
    part = 1.0 if habits.selective == "products" else 0.5
    width = workload.top_k * workload.expert_ffn + workload.shared_ffn if workload.experts else workload.ffn
    inside = (workload.heads + 2 * workload.kv_heads) * workload.head_dim + width * (workload.matrices - 1)
    attended = workload.heads * workload.head_dim
    sums = 1 if habits.is_compiled else 2  # of those that go to the stream, a compiler keeps what the backward reads
    return size * (part * (inside / tp + sums * h / share) + attended / tp + h / share) + 4 * workload.heads / tp


def cast_bytes(workload: Workload, habits: Habits, on: Degrees, *, precision: str) -> float:
    """Bytes of casts of weights that a layer keeps for the backward, where it computes in less than weights have. The
    last product of a feed-forward casts again. What is sharded is gathered in the precision of compute already."""
    if not habits.is_compiled or on.size >= habits.weight or (on.zero and on.shards > 1):
        return 0.0
    part = workload.sparse_layers / workload.layers
    but_last = (workload.matrices - 1) / workload.matrices
    dense = workload.attention_parameters + (1 - part) * but_last * workload.ffn_parameters
    dense += part * but_last * workload.matrices * workload.hidden * workload.shared_ffn
    experts = part * workload.expert_parameters / on.ep
    return (1.0 if precision == "fp8" else on.size) * dense / on.tp + on.size * experts


def is_fused(habits: Habits, *, tp: int, pp: int) -> bool:
    """Whether the last layer computes the loss itself."""
    return habits.fused_loss and tp == 1 and pp == 1


def logit_bytes(workload: Workload, habits: Habits, *, tokens: float, tp: int, pp: int, size: float) -> float:
    """Bytes of logits and what is made of them, at the fullest moment.

    Plain, all but one of what is as large as they are has gone when the gradient of the head's weight is computed.
    Fused, they exist in chunks of a quarter of all, or of `CHUNK` bytes, `CHUNKS` at a time; or if they are few, as
    they are. Beside them are a copy of the head's weight in the precision of compute, its whole gradient, what the last
    norm gives, the same cast, and its gradient.
    """
    if is_fused(habits, tp=tp, pp=pp):
        whole = tokens * workload.vocabulary * size
        chunk = whole if whole < FEW else min(whole / 4, CHUNK)
        copies = habits.copies_in_loss * (1 + (size < 4))  # softmax; and where it is computed in more, its input
        chunks = 1 + copies * 4 / size if copies or whole < FEW else CHUNKS
        weight = (size if size < 4 else 0.0) + 4
        inputs = tokens * workload.hidden * (size * (1 + (size < 4)) + habits.is_compiled * max(4.0, size))
        return chunk * chunks + weight * workload.head_parameters + inputs
    logits = tokens * workload.vocabulary / tp
    if not habits.is_lean:
        return logits * habits.logits
    return max(logits * habits.logits, 4 * (logits + workload.head_parameters / tp))  # or those of its weight


def backward_bytes(workload: Workload, habits: Habits, recompute: str, *, tokens: float, tp: int, size: float) -> float:
    """Bytes that the backward of a feed-forward holds for a moment.

    Compiled: the product of gate and up, its gradient, and theirs, all as wide as it is; of experts not the product,
    which is kept; and where the compiler recomputes, only one, since it writes the others over what it has made again.
    Where its kernels are not fused: in float32, as wide as it is; gate and up as well, where they are kept in less. And
    the gradient of one of its weights.
    """
    if habits.is_compiled:
        dense = (1 if recompute == "selective" else 4) * workload.ffn * (workload.sparse_layers < workload.layers)
        sparse = 3 * workload.top_k * workload.expert_ffn * (workload.sparse_layers > 0)
        return tokens * size * max(dense, sparse) / tp
    if not habits.backward_tensors:
        return 0.0
    width = max(workload.ffn, workload.top_k * workload.expert_ffn) / tp
    wide = 4 * (habits.backward_tensors + 1.5 * (size < 4)) * width
    return tokens * (wide + 3 * size * workload.hidden) + habits.gradient * workload.hidden * workload.ffn / tp


def message_bytes(
    workload: Workload, habits: Habits, on: Degrees, *, place: int, is_last: bool, tokens: float, m: int
) -> float:
    """Bytes of messages: what stages of a pipeline receive in, from both sides and for every microbatch of a step; and
    what tp has just sent."""
    each = tokens * workload.hidden * on.size
    sent = (2 + habits.copies_of_messages) * each if on.tp > 1 and habits.copies_of_messages else 0.0
    if on.pp == 1 or not habits.receives_ahead or m >= PLENTY:
        return sent
    received = m * (2 * on.v - (place == 0) - is_last)
    return sent + received * each / (on.tp if on.splits_tokens else 1)


# ---- traced models --------------------------------------------------------------------------------------------------


def _of_blocks(
    workload: Workload, plan: Plan, on: Degrees, cluster: Cluster, samples: int, m: int, habits: Habits
) -> Footprint:
    """Of a traced model: blocks instead of layers, samples instead of tokens; tp divides what it can."""
    numel = workload.parameters / on.tp / on.pp
    biggest = max(block.parameters for block in workload.blocks) / on.tp
    held = Held(len(workload.blocks) // on.pp, numel, 0.0, biggest, 0.0)
    is_full = plan.recompute == "full"
    kept = samples * sum(block.output if is_full else block.saved for block in workload.blocks)
    kept += sum(0.0 if is_full else block.saved_anyway for block in workload.blocks)
    working = max(samples * block.working + is_full * _saved(block, samples) for block in workload.blocks)
    flying = in_flight(plan.schedule or "1f1b", 0, on.pp, on.v, m)
    activations = (kept / on.pp * flying + working) / on.tp
    return _summed(plan, on, cluster, habits, held, Moments(activations), 0, m)


def _saved(block: Block, samples: int) -> float:
    return samples * block.saved + block.saved_anyway
