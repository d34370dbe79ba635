"""Bytes that the fullest rank will hold at its fullest moment, by cause: predicted, before anything runs.

The fullest rank of a pipeline is its first, which has most microbatches in flight, or its last, which has the logits.
Its fullest moment is the end of a forward, with all activations and the logits; or the backward after it, with the
gradients that are just being reduced; or the end of that, with the gradients of all layers but the first. States
(parameters, gradients, optimizer) are those of `predict.exact`, or in closed form for other systems. Activations follow
Korthikanti et al. 2022, with what each system keeps of them (`framework_profile`). Three numbers are distinguished:

    allocated   what tensors take                         torch.cuda.max_memory_allocated
    reserved    and what the allocator holds beside them  torch.cuda.max_memory_reserved
    total       and what lives outside of it              nvidia-smi; what has to fit

`rank_share` has the part of a model on a rank, `activations` the bytes that a layer saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from shoal.blueprint.plan import Plan
from shoal.blueprint.schedules.counts import in_flight
from shoal.predict.cluster import Cluster
from shoal.predict.estimate.activations import (
    backward_bytes,
    cast_bytes,
    is_fused,
    kept_per_token,
    logit_bytes,
    message_bytes,
    recomputed,
)
from shoal.predict.estimate.fp8_memory import kept_beside_narrow
from shoal.predict.estimate.rank_share import (
    PLENTY,
    Degrees,
    RankShare,
    StepContext,
    layers_of_ranks,
    microbatch,
    num_microbatches,
    rank_share,
)
from shoal.predict.exact.cached_states import exact_states
from shoal.predict.exact.state_memory import Memory
from shoal.predict.framework_profile import FrameworkProfile
from shoal.predict.presets.frameworks import SHOAL
from shoal.predict.workload import Block, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakMemory:
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


def peak_memory(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    *,
    sequence: int,
    global_batch: int = 0,
    profile: FrameworkProfile = SHOAL,
    stage: int | None = None,
) -> PeakMemory:
    """Of a resolved plan. `global_batch` bounds how many microbatches can be in flight; 0: there are plenty. `stage`:
    of that rank of the pipeline; None: of the fullest."""
    if cluster.device.is_host:
        profile = profile.on_host
    layout = Degrees.of(plan, profile)
    if not cluster.device.is_modern or layout.ep > 1 or layout.size != 2:
        profile = profile.without_fused_experts
    if layout.tp > 1:
        profile = profile.where_split
    if workload.lora:
        profile = profile.with_adapters
    m = num_microbatches(plan, global_batch) if global_batch else PLENTY
    samples = microbatch(plan, global_batch)
    if not workload.is_transformer:
        return _of_blocks(StepContext(workload, plan, layout, cluster, sequence, samples, m, profile))
    counts = layers_of_ranks(workload, layout.pp, layout.v, layout.is_v_shaped, profile.cut)
    places = {counts.index(count) for count in counts} | {0, layout.pp - 1}  # of as many layers, the first holds most
    if stage is not None:
        places = {stage}
    step = StepContext(workload, plan, layout, cluster, sequence, samples, m, profile)
    found = [_of_rank(step, place) for place in places]
    return max(found, key=lambda one: one.allocated)


# ---- one rank -------------------------------------------------------------------------------------------------------


def _of_rank(step: StepContext, place: int) -> PeakMemory:
    workload, plan, on, _, sequence, samples, m, profile = step
    held = rank_share(
        workload, place, tp=on.tp, pp=on.pp, v=on.v, ep=on.ep, is_v_shaped=on.is_v_shaped, profile=profile
    )
    tokens = samples * sequence / on.cp
    stream = tokens * workload.hidden * on.size
    layer = tokens * kept_per_token(workload, profile, tp=on.tp, sp=on.splits_tokens, sequence=sequence, size=on.size)
    if plan.precision == "fp8" and profile.is_compiled:
        layer += tokens * kept_beside_narrow(workload, on.size)
    casts = cast_bytes(workload, profile, on, precision=plan.precision)
    kept, kept_casts, again = layer, casts, 0.0
    if plan.recompute != "none":
        how = recomputed(
            workload, profile, plan.recompute, tp=on.tp, sp=on.splits_tokens, sequence=sequence, size=on.size
        )
        kept, kept_casts, again = tokens * how, 0.0, (layer + casts) * (plan.recompute == "full")
    flying = in_flight(plan.schedule or "1f1b", place, num_ranks=on.pp, v=on.v, num_microbatches=m)
    activations = held.layers * (kept * flying + kept_casts)
    reducing = profile.gradient_copy * (held.dense + held.experts)
    if not profile.is_compiled:
        activations += again  # one layer at a time is computed again,
        reducing += again  # and has gradients
    is_last = place == (0 if on.is_v_shaped else on.pp - 1)
    working = backward_bytes(workload, profile, plan.recompute, tokens=tokens, tp=on.tp, size=on.size)
    messages = message_bytes(workload, profile, on, place=place, is_last=is_last, tokens=tokens, m=m)
    logits = head_gradient = 0.0
    if is_last:
        logits = logit_bytes(
            workload, profile, tokens=tokens, tp=on.tp, pp=on.pp, size=on.size, precision=plan.precision
        )
        goes_with_logits = profile.is_compiled and is_fused(profile, tp=on.tp, pp=on.pp)
        activations += (1 if goes_with_logits else 2 + profile.copies_in_norm) * stream  # the last norm
        head_gradient = (
            profile.gradient * held.end * (m == 1 and (on.zero == 0 or on.shards == 1)) * (not workload.lora)
        )
    ending = closing = 0.0
    if profile.is_compiled:
        ending = (again or kept + kept_casts) + working + stream
        # The gradient of what was looked up, and the same in order; none, where the embedding is frozen.
        closing = 0.0 if workload.lora else 2 * tokens * workload.hidden * 4
        working += (again - stream if again else 0.0) + head_gradient
    moments = Moments(activations, logits, reducing, working, messages, ending, closing)
    exact = None
    if profile.is_exact and on.pp * on.v <= workload.layers:  # else a stage would be empty
        exact = exact_states(
            workload,
            plan,
            place=place,
            weight=int(profile.weight),
            gradient=int(profile.gradient),
            optimizer_states=profile.moments / profile.weight,
        )
    return _summed(step, held, moments, place, exact)


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
    step: StepContext, held: RankShare, moments: Moments, place: int, exact: Memory | None = None
) -> PeakMemory:
    """States and transients beside activations, at the fuller of two moments. `exact`: the states, counted."""
    workload, plan, on, cluster, _, _, m, profile = step
    parameters, gradients, optimizer = states(held, on, profile)
    if exact is not None:
        for_peers = (
            profile.weight * on.kept_for_peers / (profile.master + profile.moments + profile.weight * on.kept_for_peers)
        )
        parameters, gradients = exact.parameters, exact.gradients
        optimizer = exact.optimizer + for_peers * optimizer
    gathered, gathered_late, reducing = transients(held, on, profile, moments.working, workload.trained_part)
    activations, logits = moments.activations, moments.logits
    reducing += moments.reducing
    buffers = profile.bucket + moments.messages
    if profile.keeps_buckets and m > 1 and on.pp == 1 and on.zero == 0 and on.replicas * on.shards > 1:
        buffers += gradients
    other = logits  # what is there beside activations
    if gathered_late + reducing > gathered + logits:  # the fullest moment is in the backward, when logits have gone
        buffers, logits, gathered = buffers + reducing, 0.0, gathered_late
        other = reducing if profile.is_compiled else 0.0
    if m == 1 and profile.gradients_come_late and (on.zero or on.replicas == 1):
        nearly_all = gradients * (1 - held.late / (held.dense + held.experts))
        gradients = max(0.0, max(nearly_all + moments.ending, gradients + moments.closing) - activations - other)
    if plan.offload != "none" and (plan.offload_folder is not None or not cluster.device.is_host):
        optimizer = 0.0
    if plan.offload == "parameters" and on.zero == 3 and on.pp == 1:  # else what is gathered stays on the device
        parameters = gradients = 0.0
    loose = profile.fragmentation + (on.pp > 1) * profile.pipeline_fragmentation
    return PeakMemory(
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


def states(held: RankShare, on: Degrees, profile: FrameworkProfile) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer. In a pipeline gradients stay whole, and what FSDP gathers stays."""
    parameters = gradients = optimizer = 0.0
    for numel, shards in ((held.dense, on.shards), (held.experts, max(1, on.shards // on.ep))):
        divided = shards if on.zero else 1
        if (
            profile.master == 0 and on.zero and on.shards > 1
        ):  # FSDP: a shard of the optimizer's own, and a gathered copy
            parameters += numel * (profile.weight / divided + on.size * (on.zero < 3 or on.pp > 1))
        else:
            parameters += numel * profile.weight / (divided if on.zero == 3 else 1)
        gradients += numel * profile.gradient / (divided if on.zero >= 2 and on.pp == 1 else 1)
        optimizer += numel * (profile.master + profile.moments + profile.weight * on.kept_for_peers) / divided
    return parameters, gradients, optimizer


def transients(
    held: RankShare, on: Degrees, profile: FrameworkProfile, working: float = 0.0, trained: float = 1.0
) -> tuple[float, float, float]:
    """Bytes of units that are gathered for a moment, at the end of the forward and in the backward; and of gradients
    that are just being reduced then, and what a layer is `working` with. `trained`: the part that has gradients."""
    if on.shards == 1 or on.zero < (1 if profile.gathers_ends_alone else 3):
        return 0.0, 0.0, working
    reduced = trained * profile.reduce * max(held.unit, held.end if profile.gathers_ends_alone else held.root / 2)
    gathers = on.zero == 3 and on.pp == 1
    if not profile.gathers_ends_alone:
        gathered = on.size * (2 * held.unit + held.root) * gathers
        return gathered, gathered, max(2 * reduced, reduced + working)
    # A unit is gathered as one buffer, and parameter by parameter. Its gradients are reduced from another buffer, and
    # the next unit is gathered meanwhile; when that one works, those are still on their way.
    unit = on.size * held.unit * gathers
    copies = 2 + (profile.copies_of_messages > 0) * (on.zero > 1) * (1 + 1 / on.shards)
    moments = (2 * unit, copies * reduced), (3 * unit, reduced + working)
    return on.size * 2 * held.end * gathers, *max(moments, key=sum)


# ---- traced models --------------------------------------------------------------------------------------------------


def _of_blocks(step: StepContext) -> PeakMemory:
    """Of a traced model: blocks instead of layers, samples instead of tokens; tp divides what it can."""
    workload, plan, on, _, _, samples, m, _ = step
    numel = workload.parameters / on.tp / on.pp
    biggest = max(block.parameters for block in workload.blocks) / on.tp
    held = RankShare(len(workload.blocks) // on.pp, numel, 0.0, biggest, 0.0)
    is_full = plan.recompute == "full"
    kept = samples * sum(block.output if is_full else block.saved for block in workload.blocks)
    kept += sum(0.0 if is_full else block.saved_anyway for block in workload.blocks)
    working = max(samples * block.working + is_full * _saved(block, samples) for block in workload.blocks)
    flying = in_flight(plan.schedule or "1f1b", 0, num_ranks=on.pp, v=on.v, num_microbatches=m)
    activations = (kept / on.pp * flying + working) / on.tp
    return _summed(step, held, Moments(activations), 0)


def _saved(block: Block, samples: int) -> float:
    return samples * block.saved + block.saved_anyway
