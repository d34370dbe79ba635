"""Bytes that the layers of a model keep for the backward, what the backward itself needs, and the logits.

After Korthikanti et al. 2022, with what each system keeps (`framework_profile`). Symbols: h hidden, a heads of d
features, k key/value heads.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from shoal.predict.estimate.fp8_memory import has_narrow_head, head_bytes, narrow_casts
from shoal.predict.estimate.rank_share import PLENTY, Degrees
from shoal.predict.framework_profile import FrameworkProfile
from shoal.predict.workload import Workload

CHUNK = 2.0**31
"""Bytes of logits that exist at a time where the loss is fused: `CHUNK_BYTES` of
`shoal.numerics.ops.fused_linear_cross_entropy`, which imports torch."""
FEW = CHUNK / 8
"""Bytes of logits below which there is but one chunk: the same file."""


@lru_cache(maxsize=2**14)
def kept_per_token(
    workload: Workload,
    profile: FrameworkProfile,
    *,
    tp: int,
    sp: bool,
    sequence: int,
    size: float,
    has_scores: bool = True,
) -> float:
    """Bytes that one layer keeps of one token on one tp rank, without recompute. `has_scores`: those of attention too,
    where it is computed eagerly."""
    h = workload.hidden
    part = workload.sparse_layers / workload.layers
    input_of_norm = (1 - part) * profile.norm_input + part * profile.sparse_norm_input
    between = 2 * input_of_norm * size / 2 * h  # of both norms
    between += 2 * size * h if profile.keeps_normed else 0.0
    between += 2 * 4 if profile.is_memory_saving else 0.0  # what they were divided by
    between += 2 * h if profile.dropout else 0.0
    whole = 2 * size * h if profile.keeps_gathered else 0.0
    inside = _attention_kept(workload, profile, sequence, size, has_scores)
    inside += (1 - part) * _ffn_kept(workload.ffn, workload.gated, profile, size)
    if part:
        expert = 2 * size * h + _ffn_kept(workload.expert_ffn, workload.gated, profile, size)
        if (
            profile.is_memory_saving
        ):  # rows that go in, gate, up and their product; what comes out is summed up and forgotten
            expert = size * (h + (workload.matrices - 1 + workload.gated) * workload.expert_ffn)
            inside += part * size * h  # what rows are made of
        if profile.fuses_experts:
            expert = size * (workload.matrices - 1) * workload.expert_ffn
        shared = _ffn_kept(workload.shared_ffn, workload.gated, profile, size)
        inside += part * (workload.top_k * expert + shared)
    return between / (tp if sp else 1) + inside / tp + whole


def _attention_kept(
    workload: Workload, profile: FrameworkProfile, sequence: int, size: float, has_scores: bool
) -> float:
    """Queries, keys, values, what comes out of attention, and its scores or the sums of them."""
    a, k, d = workload.heads, workload.kv_heads, workload.head_dim
    if workload.latent:
        low = workload.latent
        kept = size * a * (2 * (d + low.rope_dim) + 2 * low.value_dim) + size * (low.query_rank + low.key_rank)
    else:
        kept = size * 2 * (a + k) * d
    if profile.attention == "flash":
        return kept + 4 * a
    return kept + (2 * size + 1 if profile.dropout else size) * a * sequence * has_scores


def _ffn_kept(width: int, gated: bool, profile: FrameworkProfile, size: float) -> float:
    """What goes into the activation function, and what comes out of it."""
    return size * width * (2 + profile.keeps_product + profile.keeps_silu if gated else 2)


@lru_cache(maxsize=2**14)
def recomputed(
    workload: Workload, profile: FrameworkProfile, how: str, *, tp: int, sp: bool, sequence: int, size: float
) -> float:
    """Bytes that one layer keeps of one token when it recomputes."""
    h, share = workload.hidden, tp if sp else 1
    if how == "full":
        return size * h / share
    if profile.selective == "core":
        return kept_per_token(workload, profile, tp=tp, sp=sp, sequence=sequence, size=size, has_scores=False)
    part = 1.0 if profile.selective == "products" else 0.5
    width = workload.top_k * workload.expert_ffn + workload.shared_ffn if workload.experts else workload.ffn
    inside = (workload.heads + 2 * workload.kv_heads) * workload.head_dim + width * (workload.matrices - 1)
    attended = workload.heads * workload.head_dim
    sums = 1 if profile.is_compiled else 2  # of those that go to the stream, a compiler keeps what the backward reads
    return size * (part * (inside / tp + sums * h / share) + attended / tp + h / share) + 4 * workload.heads / tp


def cast_bytes(workload: Workload, profile: FrameworkProfile, on: Degrees, *, precision: str) -> float:
    """Bytes of casts of weights that a layer keeps for the backward, where it computes in less than weights have. The
    last product of a feed-forward casts again. What is sharded is gathered in the precision of compute already."""
    if not profile.is_compiled or on.size >= profile.weight or (on.zero and on.shards > 1) or workload.lora:
        return 0.0
    part = workload.sparse_layers / workload.layers
    but_last = (workload.matrices - 1) / workload.matrices
    experts = 0.0 if profile.fuses_experts else part * workload.expert_parameters / on.ep
    if precision == "fp8":
        return narrow_casts(workload, on.size) / on.tp + on.size * experts
    dense = workload.attention_parameters + (1 - part) * but_last * workload.ffn_parameters
    dense += part * but_last * workload.matrices * workload.hidden * workload.shared_ffn
    return on.size * (dense / on.tp + experts)


def is_fused(profile: FrameworkProfile, *, tp: int, pp: int) -> bool:
    """Whether the last layer computes the loss itself."""
    return profile.fused_loss and tp == 1 and pp == 1


def logit_bytes(
    workload: Workload,
    profile: FrameworkProfile,
    *,
    tokens: float,
    tp: int,
    pp: int,
    size: float,
    precision: str = "bf16",
) -> float:
    """Bytes of logits and what is made of them, at the fullest moment.

    Plain, all but one of what is as large as they are has gone when the gradient of the head's weight is computed.
    Fused, they exist in even chunks, of half of them or of `CHUNK` bytes at most, one at a time; or if they are few, as
    they are. Beside them are a copy of the head's weight in the precision of compute, its whole gradient, what the last
    norm gives, the same cast, and its gradient.
    """
    if is_fused(profile, tp=tp, pp=pp):
        whole = tokens * workload.vocabulary * size
        chunk = whole if whole < FEW else whole / max(2, ceil(whole / CHUNK))
        if precision == "fp8" and profile.is_compiled and has_narrow_head(workload, tokens):
            of_chunk = chunk / workload.vocabulary / size
            return head_bytes(workload, tokens=tokens, chunk_tokens=of_chunk, size=size, weight=profile.weight)
        copies = profile.copies_in_loss * (1 + (size < 4))  # softmax; and where it is computed in more, its input
        chunks = 1 + copies * 4 / size
        weight = 0.0 if workload.lora else (size if size < 4 else 0.0) + 4  # frozen, it is in that precision already
        inputs = tokens * workload.hidden * (size * (1 + (size < 4)) + profile.is_compiled * max(4.0, size))
        return chunk * chunks + weight * workload.head_parameters + inputs
    logits = tokens * workload.vocabulary / tp
    if not profile.is_memory_saving:
        return logits * profile.logits
    return max(logits * profile.logits, 4 * (logits + workload.head_parameters / tp))  # or those of its weight


def backward_bytes(
    workload: Workload, profile: FrameworkProfile, recompute: str, *, tokens: float, tp: int, size: float
) -> float:
    """Bytes that the backward of a feed-forward holds for a moment.

    Compiled: the product of gate and up, its gradient, and theirs, all as wide as it is; of experts not the product,
    which is kept; and where the compiler recomputes, only one, since it writes the others over what it has made again;
    and with LoRA, which keeps the product, two.
    Where its kernels are not fused: in float32, as wide as it is; gate and up as well, where they are kept in less. And
    the gradient of one of its weights. Fused experts: the gradients of gate and up and of their input, the cast of both
    weights, and the gradients of all three.
    """
    if profile.fuses_experts and workload.sparse_layers:
        but_last = workload.matrices - 1
        rows = tokens * workload.top_k * (but_last * workload.expert_ffn + workload.hidden) / tp
        return size * rows + workload.expert_parameters * (profile.gradient + size * but_last / workload.matrices)
    if profile.is_compiled:
        of_ffn = 1 if recompute == "selective" else 2 if workload.lora else 4
        dense = of_ffn * workload.ffn * (workload.sparse_layers < workload.layers)
        sparse = 3 * workload.top_k * workload.expert_ffn * (workload.sparse_layers > 0)
        return tokens * size * max(dense, sparse) / tp
    if not profile.backward_tensors:
        return 0.0
    width = max(workload.ffn, workload.top_k * workload.expert_ffn) / tp
    wide = 4 * (profile.backward_tensors + 1.5 * (size < 4)) * width
    return tokens * (wide + 3 * size * workload.hidden) + profile.gradient * workload.hidden * workload.ffn / tp


def message_bytes(
    workload: Workload, profile: FrameworkProfile, on: Degrees, *, place: int, is_last: bool, tokens: float, m: int
) -> float:
    """Bytes of messages: what stages of a pipeline receive in, from both sides and for every microbatch of a step; and
    what tp has just sent."""
    each = tokens * workload.hidden * on.size
    sent = (2 + profile.copies_of_messages) * each if on.tp > 1 and profile.copies_of_messages else 0.0
    if on.pp == 1 or not profile.receives_ahead or m >= PLENTY:
        return sent
    received = m * (2 * on.v - (place == 0) - is_last)
    return sent + received * each / (on.tp if on.splits_tokens else 1)
